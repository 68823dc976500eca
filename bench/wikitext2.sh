#!/bin/sh
# wikitext2.sh [options] - the published run of PAR's reference: a search of 6 blocks on
# WikiText-2 in pieces, 20 epochs (37 minutes on a GPU).
#
#     DATA=DIRECTORY sh bench/wikitext2.sh [--record]    the run, evaluations, and the report (--record: to bench/results/ as well)
#     sh bench/wikitext2.sh --report [--record]          the report, of an unfinished run what there is
#
#     --precision P      bf16 or f32 (default: bf16 products where the processor has them)
#     --threads N        default: all
#     --epochs N         shorter (default 20); --steps N: shorter still. The warm-up of 4,000 steps is shortened with them
#     --seed N           first values, dropout and noise of the gates (default 1)
#     --inner N          width of the feed-forward parts (default 512, as the reference's script has it; its README says 1024)
#     --split-digits     pieces without numbers of several digits (SentencePiece's split_digits)
#     --ids              pieces are DATA/pieces.vocab and DATA/ids/, cut elsewhere (examples/get_data.sh wikitext-2-pieces)
#     --out DIR          for pieces, checkpoint, logs and results (default build/wikitext2); it belongs to one set of these settings
#     --quick            a tiny model on headers of this machine, 60 steps: tries this script
#
# DATA has train.txt, valid.txt, test.txt (examples/get_data.sh wikitext-2). Needs
# SentencePiece's library (Debian: libsentencepiece-dev), or --ids. A run that was
# interrupted goes on from its checkpoint, one an epoch, by the same command; its seconds
# are added up. Environment: CC (cc), CXX (c++), CFLAGS (-O3), SENTENCEPIECE_LIBS, DATA.
#
# What is compared. The reference prints the mean of the batches' perplexities, of pieces,
# with noise in the gates: that figure is in the report, beside true perplexities and
# those without noise. But its perplexities are of ITS pieces: 314,913 in the validation
# text, 357,981 in the test text. Other versions of SentencePiece cut the same texts into
# other numbers of pieces, and fewer pieces are harder to guess each. So the report has
# each figure converted, too: exp(loss * our pieces / its pieces). That is exact for the
# loss of the whole text (no matter how it is cut, the text has one probability); of a
# mean of batches it is the nearest thing there is.
set -eu
cd "$(dirname "$0")/.."
CC=${CC:-cc}
script=wikitext2.sh out= precision= inner= threads=0 epochs= steps= seed=1 digits= own_ids= quick= \
    report= record= command="sh bench/wikitext2.sh"
. bench/long.sh
while [ $# -gt 0 ]; do
    command="$command $1"
    case $1 in
    --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' bench/wikitext2.sh; exit 0 ;;
    --quick) quick=1 ;;
    --ids) own_ids=1 ;;
    --split-digits) digits=--split-digits ;;
    --report) report=1 ;;
    --record) record=1 ;;
    --threads|--epochs|--steps|--seed|--inner)
        number "$1" "${2:-}"
        case $1 in
        --threads) threads=$2 ;;
        --epochs) epochs=$2 ;;
        --steps) steps=$2 ;;
        --inner) inner=$2 ;;
        *) seed=$2 ;;
        esac
        command="$command $2"; shift ;;
    --out|--precision)
        word "$1" "${2:-}"
        case $1 in --out) out=$2 ;; *) precision=$2 ;; esac
        command="$command $2"; shift ;;
    *) refuse "unknown option $1 (--help)" ;;
    esac
    shift
done
[ -z "$epochs" ] || [ -z "$steps" ] || refuse "give --epochs or --steps, not both"
[ -z "$own_ids" ] || [ -z "$digits" ] ||
    refuse "--split-digits is for pieces that are made here: it does not go with --ids"
precision=${precision:-$(usual_precision)}
case $precision in f32|bf16) ;; *) refuse "--precision $precision: f32 or bf16" ;; esac
# the reference's sizes
vocab=12000 batch=32 segment=32 cutoffs=250,2500 small=
if [ -n "$quick" ]; then
    vocab=400 batch=4 segment=16 cutoffs=50,150 out=${out:-build/wikitext2-quick}
    [ -n "$epochs" ] || steps=${steps:-60}
    small="--nlayers 2 --hid-sz 32 --inner-hid-sz ${inner:-64} --nheads 2 --mem 8 --log-every 10"
elif [ -n "$inner" ]; then
    small="--inner-hid-sz $inner"
fi
out=${out:-build/wikitext2}
run=$out/run

if [ -z "$report" ]; then
    mkdir -p "$out"
    if [ -n "$quick" ] && [ -z "${DATA:-}" ]; then demo_text; fi
    texts
    pieces "$vocab" $digits
    n=$(ids "$out/text/ids/train.txt")
    # records of the reference: blocks of S + 1 pieces, a stride a stream, and what runs
    # over
    epoch=$((n / (segment + 1) - (batch - 1) * (n / (batch * (segment + 1)))))
    [ "$n" -ge $((batch * (segment + 1))) ] ||
        refuse "a training text of $n pieces has no batch of $batch x $((segment + 1))"
    if [ -n "$steps" ]; then
        every=$((steps < 4 ? 1 : steps / 4))
        [ "$every" -lt "$epoch" ] || every=$epoch
        total=$steps
        length="--steps $steps --eval-every $every --save-every $every"
    else
        total=$((${epochs:-20} * epoch))
        length="--epochs ${epochs:-20}"
    fi
    # 4,000 steps of twenty epochs, and of fewer as much of them
    warm=$((4000 * total / (20 * epoch)))
    set -- --preset reference --tokens ids $small --batch-sz $batch --block-sz $segment --vocab \
        "$vocab" --cutoffs $cutoffs $length \
        --lr-warmup $((warm > 4000 ? 4000 : warm + (warm == 0))) --seed "$seed" --precision \
        "$precision"
    settle "$*; pieces: ${digits:-as the library cuts}${own_ids:+, cut elsewhere}; training, validation, test: $(sum "$out/text/train.txt" \
        ) $(sum "$out/text/valid.txt") $(sum "$out/text/test.txt"); their pieces: $(sum \
        "$out/text/ids/train.txt" "$out/text/pieces.vocab")"
    for part in valid test; do
        echo "$part $(ids "$out/text/ids/$part.txt") $(tokens "$out/text/$part.txt")"
    done >"$out/counts"
    echo "train $n $(tokens "$out/text/train.txt") $epoch $((batch * segment))" \
        "$total" >>"$out/counts"
    build train_par
    . bench/machine.sh
    if [ ! -s "$run.done" ]; then
        echo "$(date +%H:%M) $total steps, $epoch an epoch, $precision .."
        timed "$run" "$out/train_par" "$@" --threads "$threads" --data "$out/text/ids" --pieces \
            "$out/text/pieces.vocab" \
            --checkpoint "$run.safetensors" --log "$run.jsonl" --picture "$out/pi.svg"
        echo "$commit; $cpu, $cores cores, ${vector:-no vector flags known}; threads:" \
            "$threads (0: all)" >"$run.done"
    fi
    for gates in noise soft argmax; do
        if [ -s "$out/$gates.done" ]; then continue; fi
        rm -f "$out/$gates.jsonl"
        "$out/train_par" --checkpoint "$run.safetensors" --eval-only --gate-eval $gates --threads \
            "$threads" --data "$out/text/ids" \
            --log "$out/$gates.jsonl" >"$out/$gates.txt" 2>"$out/$gates.err" ||
            { tail -n 1 "$out/$gates.err" >&2; exit 1; }
        sed -n 's/^architecture: //p' "$out/$gates.txt" >"$out/$gates.done"
    done
fi

[ -s "$run.jsonl" ] && [ -s "$out/counts" ] || refuse "there is no run in $out"
. bench/machine.sh
: >"$out/results.json"          # a line for each text and kind of gates
for gates in noise soft argmax; do
    [ ! -s "$out/$gates.done" ] ||
        sed -n '/"event":"eval"/s/^{/{"gates":"'$gates'",/p' \
        "$out/$gates.jsonl" >>"$out/results.json"
done
{
    echo "# PAR's reference on WikiText-2, $(date +%Y-%m-%d)"
    echo
    echo "- machine and commit of the run:" \
        "$(cat "$run.done" 2>/dev/null ||
        echo "it is not at its end; time is that of finished parts")"
    echo "- command: \`$command\`"
    echo "- settings, checksums and sizes of the texts: \`$(cat "$out/settings")\`"
    awk -v how="$(cat "$out/argmax.done" 2>/dev/null || echo "not known yet")" \
        -v spent="$(cat "$run.spent" 2>/dev/null || echo 0 0 0 0)" '
        function text(key) {
            return match($0, "\"" key "\":\"[^\"]*") \
                ? substr($0, RSTART + length(key) + 4, RLENGTH - length(key) - 4) : ""
        }
        function number(key) {
            return match($0, "\"" key "\":[-+0-9.e]*") \
                ? substr($0, RSTART + length(key) + 3, RLENGTH - length(key) - 3) + 0 : 0
        }
        function duration(s) {
            return s < 600 ? sprintf("%.0f s", s) : s < 36000 ? sprintf("%.0f min", s / 60) \
                : sprintf("%.1f h", s / 3600)
        }
        FILENAME ~ /counts$/ {
            pieces[$1] = $2; words[$1] = $3
            if ($1 == "train") { epoch = $4; each = $5; total = $6 }
            next
        }
        FILENAME ~ /results.json$/ {
            key = text("gates") " " text("split"); rows++
            loss[key] = number("loss"); mean[key] = number("batch_ppl")
            next
        }
        text("event") == "train" {
            s = number("step")
            took += number("tokens_per_s") > 0 ? (s - last) * each / number("tokens_per_s") : 0
            ppl += (s - last) * exp(number("loss")); steps += s - last; last = s
            peak = number("peak_bytes")
        }
        text("event") == "eval" {
            if (number("step") != row_step[n]) n++
            row_step[n] = number("step"); row_loss[n] = number("loss")
            row_mean[n] = number("batch_ppl")
            row_train[n] = steps ? ppl / steps : 0; ppl = steps = 0
        }
        END {
            # WikiText-2 by its published words and line ends; the reference has a figure
            # of it
            ours = words["valid"] == 217646 && words["test"] == 245569
            theirs["valid"] = 314913; theirs["test"] = 357981
            split(spent, t, " ")
            if (!last) { print "- no step is in the log yet"; exit }
            printf "- time: %s by the clock (%s of the processor), evaluations and saving in it, %d times interrupted%s;\n", duration(t[1]), duration(t[2]), t[3],
                t[4] ? sprintf("; %d times it ended so that its seconds are not known and not in it",
                t[4]) : ""
            printf "  %.1f ms a step of %d pieces by that, %.1f ms by the log without evaluations; peak memory %.0f MiB\n", 1000 * t[1] / last, each, 1000 * took / last, peak / 1048576
            printf "- steps: %d of %d in all, %d an epoch; architecture: %s\n", last, total, epoch,
                how
            printf "\nPieces (a word: also a line end):\n\n| text | words and line ends | pieces | a word | pieces of the reference | a word |\n|---|--:|--:|--:|--:|--:|\n"
            m = split("train valid test", part, " ")
            for (i = 1; i <= m; i++) { p = part[i]
                printf "| %s | %d | %d | %.3f | %s |\n", p, words[p], pieces[p],
                    pieces[p] / words[p], ours &&
                        p in theirs ? sprintf("%d | %.3f", theirs[p],
                            theirs[p] / words[p]) : "- | -" }
            printf "\nPerplexities at the end. Of a piece: exp of the mean loss. Mean of batches: of their perplexities, as the reference measures it.\n"
            printf "Converted: to the number of pieces that the reference has, exp(loss ours / theirs). Of a word: also comparable, whatever the pieces are.\n"
            printf "Gates: with noise (the reference), as mixtures, or the likeliest branch of each block alone, which is not a network trained as such.\n\n"
            print "| text | gates | mean of batches | of a piece | mean of batches, converted | of a piece, converted | of a word |"
            print "|---|---|--:|--:|--:|--:|--:|"
            split("noise soft argmax", gate, " ")
            for (j = 2; j <= 3 && rows; j++) { p = part[j]; r = ours ? pieces[p] / theirs[p] : 0
                for (i = 1; i <= 3; i++) { key = gate[i] " " p
                    if (!(key in loss)) continue
                    printf "| %s | %s | %.2f | %.2f | %s | %.1f |\n", p, gate[i], mean[key],
                        exp(loss[key]),
                        r ? sprintf("%.2f | %.2f", exp(log(mean[key]) * r),
                        exp(loss[key] * r)) : "- | -", exp(loss[key] * pieces[p] / words[p]) }
                if (ours && p == "valid")
                    printf "| valid | reference, published, 20 epochs | %.2f in these pieces (converted) | - | 39.41 | - | about %.0f |\n",
                        exp(log(39.41) / r), exp(log(39.41) * theirs[p] / words[p])
            }
            if (!ours)
                print "\nThis text is not WikiText-2: the published figures are not of it, and nothing is converted."
            else
                printf "\nOf the test text nothing is published. Published in these pieces: 39.41 ^ (%d / %d).\n", theirs["valid"], pieces["valid"]
            k = split("1 163.9 114.4 3 78.56 62.33 5 65.71 51.88 10 48.52 42.61 17 41.85 39.57 20 42.12 39.41", q, " ")
            for (i = 1; i <= k; i += 3) { want[q[i]] = sprintf("%s | %s", q[i+1], q[i+2]) }
            whole = ours && total == 20 * epoch
            printf "\nBy epoch. train: mean of exp(loss of %s steps) since the row before, with dropout and noise (the reference: of every step of the epoch).\n", "the log\047s"
            if (whole)
                print "The published columns are of its own pieces: beside them stands \"converted\", not \"mean of batches\", and train is of ours. (Its steps: 2.7k, 8.5k, 14.1k, 28.3k, 48.1k, 56.5k.)"
            printf "\n| epoch | step | train | valid, mean of batches | valid, of a piece | valid, mean of batches, converted | of a word |%s\n", whole ? " published train | valid |" : ""
            printf "|--:|--:|--:|--:|--:|--:|--:|%s\n", whole ? "--:|--:|" : ""
            for (i = 1; i <= n; i++) { e = row_step[i] / epoch; name = e == int(e) ? e "" : sprintf("%.2f", e)
                printf "| %s | %d | %s | %.2f | %.2f | %s | %.1f |%s\n", name, row_step[i],
                    row_train[i] ? sprintf("%.2f", row_train[i]) : "-", row_mean[i],
                    exp(row_loss[i]),
                    ours ? sprintf("%.2f",
                    exp(log(row_mean[i]) * pieces["valid"] / theirs["valid"])) : "-",
                    exp(row_loss[i] * pieces["valid"] / words["valid"]),
                    whole ? (name in want ? " " want[name] " |" : " | |") : "" }
            if (ours && !whole)
                printf "\nThis is no run of 20 epochs (its warm-up is shortened, too): only such a run compares with the published one.\n"
        }' "$out/counts" "$out/results.json" "$run.jsonl"
} >"$out/report.md"
cat "$out/report.md"
if [ -n "$record" ]; then
    # every evaluation, and of the steps one record in ten; what begins a log has paths in
    # it
    awk '/"event":"train"/ { if (n++ % 10 == 0) print } /"event":"eval"/' \
        "$run.jsonl" >"$out/thin.jsonl"
    record wikitext2 "$out/results.json" "$out/thin.jsonl"
fi
