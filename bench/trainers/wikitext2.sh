#!/bin/sh
# wikitext2.sh [options] - repeats the published run of PAR's reference: a search of 6
# blocks on WikiText-2 in pieces, 20 epochs (37 minutes on a GPU).
#
#     DATA=DIRECTORY sh bench/trainers/wikitext2.sh [--record]  run, evaluations and report
#     sh bench/trainers/wikitext2.sh --report [--record]        report, also of an unfinished run
#
#     --precision P      bf16 or f32 (default: bf16 if the processor supports it)
#     --threads N        default: all
#     --epochs N         default 20; the warm-up of 4,000 steps is scaled with the length
#     --steps N          a length in steps instead
#     --seed N           initial weights, dropout and noise of the gates (default 1)
#     --inner N          width of the feed-forward blocks (default 512, as in the script of
#                        the reference; its README says 1024)
#     --split-digits     split numbers into digits (split_digits of SentencePiece)
#     --ids              use DATA/pieces.vocab and DATA/ids/ instead of making pieces
#                        (examples/get_data.sh wikitext-2-pieces)
#     --out DIR          output of one set of settings (default build/wikitext2)
#     --quick            a tiny model, 60 steps, on system headers: tests this script
#     --record           also write the report to bench/results/
#
# DATA contains train.txt, valid.txt and test.txt (examples/get_data.sh wikitext-2). Needs
# SentencePiece's library (Debian: libsentencepiece-dev) or --ids. An interrupted run
# resumes from its checkpoint (one per epoch) with the same command; its times are added
# up. Environment: CC (cc), CXX (c++), CFLAGS (-O3), SENTENCEPIECE_LIBS, DATA.
#
# What is compared. The reference prints the mean of the perplexities of the batches, per
# piece, with noise in the gates. The report contains that figure, true perplexities, and
# perplexities without noise. The reference, however, counts its own pieces: 314,913 in
# the validation text, 357,981 in the test text. Other versions of SentencePiece cut the
# same texts into other numbers of pieces, and fewer pieces are harder to predict. The
# report therefore also contains each figure converted: exp(loss * our pieces / its
# pieces). This is exact for the loss of the whole text, which has one probability however
# it is cut, and an approximation for a mean of batches.
set -eu
cd "$(dirname "$0")/../.."
CC=${CC:-cc}
script=wikitext2.sh out= precision= inner= threads=0 epochs= steps= seed=1 digits= own_ids= quick= \
    report= record= command="sh bench/trainers/wikitext2.sh"
. bench/trainers/long.sh
while [ $# -gt 0 ]; do
    command="$command $1"
    case $1 in
    --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' bench/trainers/wikitext2.sh; exit 0 ;;
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
[ -z "$epochs" ] || [ -z "$steps" ] || refuse "--epochs and --steps cannot be combined"
[ -z "$own_ids" ] || [ -z "$digits" ] ||
    refuse "--split-digits and --ids cannot be combined: --ids uses existing pieces"
precision=${precision:-$(usual_precision)}
case $precision in
f32|bf16) ;;
*) refuse "--precision: expected f32 or bf16, got $precision" ;;
esac
# sizes of the reference
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
        refuse "a training text of $n pieces is shorter than a batch of $batch x $((segment + 1))"
    if [ -n "$steps" ]; then
        every=$((steps < 4 ? 1 : steps / 4))
        [ "$every" -lt "$epoch" ] || every=$epoch
        total=$steps
        length="--steps $steps --eval-every $every --save-every $every"
    else
        total=$((${epochs:-20} * epoch))
        length="--epochs ${epochs:-20}"
    fi
    # 4,000 steps of warm-up for twenty epochs, proportionally fewer for shorter runs
    warm=$((4000 * total / (20 * epoch)))
    set -- --preset reference --tokens ids $small --batch-sz $batch --block-sz $segment \
        --vocab "$vocab" --cutoffs $cutoffs $length \
        --lr-warmup $((warm > 4000 ? 4000 : warm + (warm == 0))) --seed "$seed" \
        --precision "$precision"
    sums=
    for part in train valid test; do sums="$sums $(sum "$out/text/$part.txt")"; done
    sums="$sums; their pieces: $(sum "$out/text/ids/train.txt" "$out/text/pieces.vocab")"
    how="${digits:-as the library cuts}${own_ids:+, cut elsewhere}"
    settle "$*; pieces: $how; training, validation, test:$sums"
    for part in valid test; do
        echo "$part $(ids "$out/text/ids/$part.txt") $(tokens "$out/text/$part.txt")"
    done >"$out/counts"
    echo "train $n $(tokens "$out/text/train.txt") $epoch $((batch * segment))" \
        "$total" >>"$out/counts"
    build train_par
    . bench/machine.sh
    if [ ! -s "$run.done" ]; then
        echo "$(date +%H:%M) $total steps, $epoch an epoch, $precision .."
        timed "$run" "$out/train_par" "$@" --threads "$threads" --data "$out/text/ids" \
            --pieces "$out/text/pieces.vocab" \
            --checkpoint "$run.safetensors" --log "$run.jsonl" --picture "$out/pi.svg"
        echo "$commit; $cpu, $cores cores, ${vector:-no vector flags known}; threads:" \
            "$threads (0: all)" >"$run.done"
    fi
    for gates in noise soft argmax; do
        if [ -s "$out/$gates.done" ]; then continue; fi
        rm -f "$out/$gates.jsonl"
        "$out/train_par" --checkpoint "$run.safetensors" --eval-only --gate-eval $gates \
            --threads "$threads" --data "$out/text/ids" \
            --log "$out/$gates.jsonl" >"$out/$gates.txt" 2>"$out/$gates.err" ||
            { tail -n 1 "$out/$gates.err" >&2; exit 1; }
        sed -n 's/^architecture: //p' "$out/$gates.txt" >"$out/$gates.done"
    done
fi

[ -s "$run.jsonl" ] && [ -s "$out/counts" ] || refuse "there is no run in $out"
. bench/machine.sh
: >"$out/results.json"          # one line per text and kind of gates
for gates in noise soft argmax; do
    [ ! -s "$out/$gates.done" ] ||
        sed -n '/"event":"eval"/s/^{/{"gates":"'$gates'",/p' \
        "$out/$gates.jsonl" >>"$out/results.json"
done
{
    echo "# PAR's reference on WikiText-2, $(date +%Y-%m-%d)"
    echo
    where=$(cat "$run.done" 2>/dev/null || echo "unfinished; the time is that of finished parts")
    echo "- machine and commit of the run: $where"
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
            # The published counts of words and line ends identify WikiText-2.
            ours = words["valid"] == 217646 && words["test"] == 245569
            theirs["valid"] = 314913; theirs["test"] = 357981
            split(spent, t, " ")
            if (!last) { print "- no step is in the log yet"; exit }
            printf "- time: %s wall clock (%s processor), with evaluations and saving,",
                duration(t[1]), duration(t[2])
            printf " %d interruptions", t[3]
            if (t[4]) printf "; the time of %d parts is unknown and not included", t[4]
            printf ";\n  %.1f ms per step of %d pieces by that, %.1f ms by the log",
                1000 * t[1] / last, each, 1000 * took / last
            printf " without evaluations; peak memory %.0f MiB\n", peak / 1048576
            printf "- steps: %d of %d in all, %d per epoch; architecture: %s\n", last, total, epoch,
                how
            printf "\nPieces (words include line ends):\n\n"
            printf "| text | words and line ends | pieces | per word |"
            print " pieces of the reference | per word |\n|---|--:|--:|--:|--:|--:|"
            m = split("train valid test", part, " ")
            for (i = 1; i <= m; i++) {
                p = part[i]
                printf "| %s | %d | %d | %.3f |", p, words[p], pieces[p], pieces[p] / words[p]
                if (ours && p in theirs)
                    printf " %d | %.3f |\n", theirs[p], theirs[p] / words[p]
                else
                    printf " - | - |\n"
            }
            printf "\nFinal perplexities. Per piece: exp of the mean loss. Mean of batches: mean of"
            printf " their perplexities, as the reference measures it.\nConverted: to the number of"
            printf " pieces of the reference, exp(loss ours / theirs). Per word: comparable for all"
            printf " kinds of pieces.\nGates: with noise (the reference), as mixtures, or only the"
            printf " likeliest branch of each block, a network that was not trained as such.\n\n"
            printf "| text | gates | mean of batches | per piece | mean of batches, converted |"
            print " per piece, converted | per word |"
            print "|---|---|--:|--:|--:|--:|--:|"
            split("noise soft argmax", gate, " ")
            for (j = 2; j <= 3 && rows; j++) {
                p = part[j]
                r = ours ? pieces[p] / theirs[p] : 0
                for (i = 1; i <= 3; i++) {
                    key = gate[i] " " p
                    if (!(key in loss)) continue
                    printf "| %s | %s | %.2f | %.2f |", p, gate[i], mean[key], exp(loss[key])
                    if (r) printf " %.2f | %.2f |", exp(log(mean[key]) * r), exp(loss[key] * r)
                    else printf " - | - |"
                    printf " %.1f |\n", exp(loss[key] * pieces[p] / words[p])
                }
                if (ours && p == "valid") {
                    printf "| valid | reference, published, 20 epochs |"
                    printf " %.2f in these pieces (converted) | - | 39.41 | - | about %.0f |\n",
                        exp(log(39.41) / r), exp(log(39.41) * theirs[p] / words[p])
                }
            }
            if (!ours) {
                printf "\nThis text is not WikiText-2: the published figures do not apply, and"
                print " nothing is converted."
            } else {
                printf "\nNo figure of the test text is published. Published in these pieces:"
                printf " 39.41 ^ (%d / %d).\n", theirs["valid"], pieces["valid"]
            }
            # published: epoch, training perplexity, validation perplexity
            published = "1 163.9 114.4 3 78.56 62.33 5 65.71 51.88"
            k = split(published " 10 48.52 42.61 17 41.85 39.57 20 42.12 39.41", q, " ")
            for (i = 1; i <= k; i += 3) { want[q[i]] = sprintf("%s | %s", q[i+1], q[i+2]) }
            whole = ours && total == 20 * epoch
            printf "\nBy epoch. train: mean of exp(loss of %s steps) since the previous row,",
                "the log\047s"
            printf " with dropout and noise (the reference: of every step of the epoch).\n"
            if (whole) {
                printf "The published columns count the pieces of the reference: compare them with"
                printf " \"converted\", not with \"mean of batches\". train counts our pieces."
                print " (Its steps: 2.7k, 8.5k, 14.1k, 28.3k, 48.1k, 56.5k.)"
            }
            printf "\n| epoch | step | train | valid, mean of batches | valid, per piece |"
            printf " valid, mean of batches, converted | per word |%s\n",
                whole ? " published train | valid |" : ""
            printf "|--:|--:|--:|--:|--:|--:|--:|%s\n", whole ? "--:|--:|" : ""
            for (i = 1; i <= n; i++) {
                e = row_step[i] / epoch
                name = e == int(e) ? e "" : sprintf("%.2f", e)
                printf "| %s | %d | %s | %.2f | %.2f |", name, row_step[i],
                    row_train[i] ? sprintf("%.2f", row_train[i]) : "-", row_mean[i],
                    exp(row_loss[i])
                r = ours ? pieces["valid"] / theirs["valid"] : 0
                if (r) printf " %.2f |", exp(log(row_mean[i]) * r)
                else printf " - |"
                printf " %.1f |", exp(row_loss[i] * pieces["valid"] / words["valid"])
                if (whole) printf "%s", name in want ? " " want[name] " |" : " | |"
                printf "\n"
            }
            if (ours && !whole) {
                printf "\nThis is not a run of 20 epochs with the full warm-up: it cannot be"
                print " compared with the published run."
            }
        }' "$out/counts" "$out/results.json" "$run.jsonl"
} >"$out/report.md"
cat "$out/report.md"
if [ -n "$record" ]; then
    # All evaluations, and every tenth training record. The first record contains paths.
    awk '/"event":"train"/ { if (n++ % 10 == 0) print } /"event":"eval"/' \
        "$run.jsonl" >"$out/thin.jsonl"
    record wikitext2 "$out/results.json" "$out/thin.jsonl"
fi
