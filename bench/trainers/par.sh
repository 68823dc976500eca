#!/bin/sh
# par.sh [options] - are most attention blocks of a Transformer-XL worth their time? Tests
# the claim of PAR at a small scale. Runs a search on WikiText-2, then trains the string
# it found, the alternating Transformer-XL (xl) and the rule of the paper (par) from
# scratch.
#
#     DATA=DIRECTORY sh bench/trainers/par.sh             all runs, then the report
#     DATA=.. sh bench/trainers/par.sh --only xl,par      some of the runs
#     sh bench/trainers/par.sh --report [--record]        report of the finished runs
#
#     --only LIST        of search,found,xl,par,times (default: all); found and times need
#                        the search of the same --out
#     --seeds LIST       default 1,2,3
#     --steps N          steps of each run and of the search (default 3000)
#     --threads N        threads per run (default 1)
#     --tokens T         pieces, words or bytes (default pieces)
#     --ids, --split-digits    as in bench/trainers/wikitext2.sh
#     --blocks N         number of blocks (default 12)
#     --par P            the rule has one attention per P blocks (default 4)
#     --dim N, --mem N, --segment N    width, rows of memory, segment (128, 128, 64)
#     --target X         time target of the search in percent of xl (default 80)
#     --inherit          start all three networks from the weights of the search
#     --precision P      bf16 or f32 (default: bf16 if the processor supports it)
#     --out DIR          logs and results of one set of settings (default build/par)
#     --keep             keep the networks
#     --quick            tiny networks of bytes, 30 steps, two seeds: a one-minute test
#     --record           also write the report to bench/results/
#
# Each training is one call of examples/train_par.c. It writes NAME.SEED.log and one line
# of JSON, NAME.SEED.json, to DIR. An interrupted script resumes with the same command:
# finished runs are skipped, an unfinished one resumes from its last checkpoint. Scripts
# with the same settings and different lists can share a DIR. On two cores, run --only
# search,found and --only xl,par concurrently, then --only times. Environment: CC (cc),
# CXX (c++), CFLAGS (-O3), SENTENCEPIECE_LIBS, DATA with train.txt, valid.txt, test.txt.
#
# What is compared. found, xl and par have the same number of blocks, width, text, steps,
# batch, learning rate and optimiser, and newly initialised weights. The seed sets the
# initial weights; the order of the text is the same. The number of parameters differs: a
# feed-forward block of width 4 d has 8 d^2, an attention block 5 d^2. Networks with fewer
# attentions therefore have more; the table lists both. The search is that of the paper:
# each block mixes the three kinds with Gumbel noise at a temperature from 2 to 0.4. The
# weights are trained on four fifths of the text; the gates on the rest, in separate steps
# that begin after a quarter of the run. The search also measures the time of an attention
# and of a feed-forward block when it starts. Its loss increases with the expected time
# above the target. found is the likeliest string or one of 16 sampled strings: the one
# with the lowest loss on part of the validation text, with the weights of the search,
# among those within the target. "times" measures the networks interleaved with xl: a
# training step without the optimiser, an evaluation, and the processor seconds per
# generated token (long texts minus short ones). It reports medians over rounds.
#
# Cost with d 128, 12 blocks, T 64, memory 128, batch 16, clusters of 1,000 and 4,000 of
# 12,000 words: a step took 0.19 s (xl), 0.15 s (par:4) and 0.30 s (search) on one core of
# a busy machine with bf16 in AMX, so everything takes 60 to 90 processor minutes. The
# memory is twice the segment so that an attention block takes 2.5 times as long as a
# feed-forward block. With a memory of 64 rows the factor is 2, and there is little to
# gain.
set -eu
cd "$(dirname "$0")/../.."
CC=${CC:-cc}
script=par.sh blocks= dim= segment= mem= batch=16 heads=4 rule= target=80 steps= seeds= tokens= \
    inherit= only=search,found,xl,par,times
out= threads=1 precision= digits= own_ids= keep= quick= report= record= rounds=5 \
    command="sh bench/trainers/par.sh"
. bench/trainers/long.sh
while [ $# -gt 0 ]; do
    command="$command $1"
    case $1 in
    --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' bench/trainers/par.sh; exit 0 ;;
    --quick) quick=1 ;;
    --keep) keep=1 ;;
    --inherit) inherit=1 ;;
    --ids) own_ids=1 ;;
    --split-digits) digits=--split-digits ;;
    --report) report=1 ;;
    --record) record=1 ;;
    --steps|--threads|--blocks|--par|--dim|--mem|--segment|--target)
        number "$1" "${2:-}"
        case $1 in
        --steps) steps=$2 ;;
        --threads) threads=$2 ;;
        --blocks) blocks=$2 ;;
        --par) rule=$2 ;;
        --dim) dim=$2 ;;
        --mem) mem=$2 ;;
        --segment) segment=$2 ;;
        *) target=$2 ;;
        esac
        command="$command $2"; shift ;;
    --only|--seeds|--tokens|--out|--precision)
        word "$1" "${2:-}"
        case $1 in
        --only) only=$2 ;;
        --seeds) seeds=$2 ;;
        --tokens) tokens=$2 ;;
        --out) out=$2 ;;
        *) precision=$2 ;;
        esac
        command="$command $2"; shift ;;
    *) refuse "unknown option $1 (--help)" ;;
    esac
    shift
done
documents=50
if [ -n "$quick" ]; then
    blocks=${blocks:-6} dim=${dim:-32} segment=${segment:-16} mem=${mem:-16} rule=${rule:-3} \
        steps=${steps:-30} seeds=${seeds:-1,2}
    tokens=${tokens:-bytes} out=${out:-build/par-quick} batch=4 heads=2 rounds=2 documents=10
fi
blocks=${blocks:-12} dim=${dim:-128} segment=${segment:-64} mem=${mem:-128} rule=${rule:-4} \
    steps=${steps:-3000} seeds=${seeds:-1,2,3}
tokens=${tokens:-pieces} out=${out:-build/par}
precision=${precision:-$(usual_precision)}
case $precision in
f32|bf16) ;;
*) refuse "--precision: expected f32 or bf16, got $precision" ;;
esac
clusters="--words-out adaptive --adaptive-in --tied --div-val 1"
case $tokens in
pieces) text=ids words="--tokens ids $clusters --cutoffs 1000,4000" ;;
words) text= words="--tokens words $clusters --cutoffs 2000,10000" ;;
bytes) text= words="--tokens bytes" ;;
*) refuse "--tokens: expected pieces, words or bytes, got $tokens" ;;
esac
[ "$tokens" = pieces ] || [ -z "$own_ids$digits" ] ||
    refuse "--ids and --split-digits require --tokens pieces"
[ -z "$own_ids" ] || [ -z "$digits" ] ||
    refuse "--split-digits and --ids cannot be combined: --ids uses existing pieces"
[ "$rule" -ge 2 ] && [ "$rule" -le "$blocks" ] ||
    refuse "--par: expected 2 to $blocks (the number of blocks), got $rule"
[ $((dim % heads)) = 0 ] ||
    refuse "--dim: expected a multiple of $heads, the number of heads, got $dim"
names=$(echo "$only" | tr , ' ')
for name in $names; do
    case $name in
    search|found|xl|par|times) ;;
    *) refuse "--only: expected some of search,found,xl,par,times, got $name" ;;
    esac
done
for seed in $(echo "$seeds" | tr , ' '); do number --seeds "$seed"; done

# pattern NAME: sets pattern; that of found is in search.json
pattern() {
    case $1 in
    xl) pattern=xl ;;
    par) pattern=par:$rule ;;
    *) [ -s "$out/search.json" ] ||
        refuse "found needs a search, and $out contains none yet: add search to --only"
       pattern=$(text pattern "$out/search.json") ;;
    esac
}
# describe NAME: sets pattern, string, order (the string in words), attend (number of
# attentions) and params of a network that is not trained yet
describe() {
    pattern "$1"
    "$out/train_par" $model --pattern "$pattern" --data "$data" $lists --dry-run >"$out/dry.$$" ||
        exit 2
    params=$(sed -n 's/^\([0-9]*\) parameters.*/\1/p' "$out/dry.$$")
    string=$(sed -n 's/^[0-9]* blocks \([^:]*\): .*/\1/p' "$out/dry.$$")
    order=$(sed -n 's/^[0-9]* blocks [^:]*: \([^;]*\);.*/\1/p' "$out/dry.$$")
    attend=$(sed -n 's/^[0-9]* blocks [^;]*; \([0-9]*\) of them attention.*/\1/p' "$out/dry.$$")
    rm -f "$out/dry.$$"
}

if [ -z "$report" ]; then
    mkdir -p "$out"
    if [ -n "$quick" ] && [ -z "${DATA:-}" ]; then demo_text; fi
    texts
    data=$out/text lists=
    if [ -n "$text" ]; then
        pieces 12000 $digits
        data=$out/text/ids lists="--pieces $out/text/pieces.vocab"
    fi
    model="--nlayers $blocks --hid-sz $dim --nheads $heads --inner-hid-sz $((4 * dim))"
    model="$model --block-sz $segment --mem $mem --batch-sz $batch $words --dropout 0"
    train="--optim adam --lr 0.001 --schedule cosine --lr-warmup $((steps / 20 + 1))"
    train="$train --lr-min 0.00001 --grad-clip 1 --steps $steps --eval-every 0 --eval-blocks 1"
    train="$train --save-every $((steps / 10 + 1)) --log-every $((steps < 100 ? 1 : 100))"
    train="$train --precision $precision"
    search="--pattern search --arch-from $((steps / 4)) --arch-share 0.2 --arch-every 5"
    search="$search --arch-optim adam --arch-lr 0.03 --arch-weight-decay 0.0005 --tau-start 2"
    search="$search --tau-end 0.4 --noise sequence --latency hinge --latency-weight 1"
    search="$search --latency-target $((target / 100)).$(printf %02d $((target % 100)))"
    start="${inherit:+with the weights of the search; }"
    start="$start$tokens${digits:+ $digits}${own_ids:+ of the data}"
    sums="$(sum "$data/train.txt") $(sum "$data/valid.txt") $(sum "$data/test.txt")"
    settle "$model $train; $search; $start; training, validation, test: $sums"
    build train_par
    . bench/machine.sh
    # The search first, then all networks of a seed, so that half of the runs make a
    # useful report.
    jobs=
    case " $names " in *" search "*) jobs=search.1 ;; esac
    for seed in $(echo "$seeds" | tr , ' '); do
        for name in $names; do
            case $name in found|xl|par) jobs="$jobs $name.$seed" ;; esac
        done
    done
    for job in $jobs; do
        name=${job%.*} seed=${job#*.}
        run=$out/$job
        [ "$name" != search ] || run=$out/search
        if [ -s "$run.json" ]; then continue; fi
        echo "$(date +%H:%M) $name, seed $seed .."
        if [ "$name" = search ]; then
            timed "$run" "$out/train_par" $model $train $search --seed "$seed" \
                --threads "$threads" --data "$data" $lists --checkpoint "$run.safetensors" \
                --log "$run.log" --picture "$out/search.svg"
            read -r _ seconds _ unknown <"$run.spent"
            "$out/train_par" --checkpoint "$run.safetensors" --derive --derive-samples 16 \
                --eval-blocks $documents --threads "$threads" --data "$data" \
                >"$run.found" 2>>"$run.err" || { tail -n 1 "$run.err" >&2; exit 1; }
            # Lines are "argmax STRING unit X T % .." and "sample N STRING unit X T % ..".
            # The line of the paper's rule is skipped.
            found=$(awk -v target="$target" '
                $1 == "sample" { $1 = ""; $0 = $0 }
                $1 ~ /^(argmax|[0-9]+)$/ {
                    in_time = $5 <= target
                    better = in_time ? $4 < best : $5 < time
                    if (in_time != best_in) better = in_time
                    if (!n++ || better) {
                        best_in = in_time
                        best = $4
                        time = $5
                        what = $1
                        string = $2
                    }
                }
                END {
                    if (!n) exit 1
                    print string, time, what == "argmax" ? "likeliest" : "drawn"
                }' "$run.found") || exit 1
            set -- $found
            likeliest=$(awk '$1 == "argmax" { print $2 }' "$run.found")
            form='{"network":"search","seed":%d,"steps":%d,"pattern":"%s","how":"%s"'
            form=$form',"time_to_xl":%s,"likeliest":"%s","latency_table":"%s","seconds":%d'
            form=$form',"precision":"%s","commit":"%s","machine":"%s"}\n'
            printf "$form" \
                "$seed" "$steps" "$1" "$3" "$2" "$likeliest" "$(text latency-table "$run.log")" \
                "$seconds" "$precision" "$commit" "$cpu, $cores cores" >"$run.json"
            echo "      found $1, $2 % of the time of xl by the search's table;" \
                "$seconds processor s"
            continue
        fi
        describe "$name"
        from=
        if [ -n "$inherit" ]; then
            [ -s "$out/search.safetensors" ] ||
                refuse "--inherit: $out contains no search yet: add search to --only"
            from="--inherit $out/search.safetensors"
        fi
        timed "$run" "$out/train_par" $model $train --pattern "$pattern" $from --seed "$seed" \
            --threads "$threads" --data "$data" $lists \
            --checkpoint "$run.safetensors" --log "$run.log"
        read -r _ seconds _ unknown <"$run.spent"
        rm -f "$run.eval"
        "$out/train_par" --checkpoint "$run.safetensors" --eval-only --threads "$threads" \
            --data "$data" --log "$run.eval" >>"$run.txt" 2>>"$run.err" ||
            { tail -n 1 "$run.err" >&2; exit 1; }
        grep '"split":"valid"' "$run.eval" >"$run.valid"
        grep '"split":"test"' "$run.eval" >"$run.test"
        form='{"network":"%s","seed":%d,"steps":%d,"tokens":"%s","pattern":"%s","order":"%s"'
        form=$form',"attention":%d,"blocks":%d,"parameters":%d,"valid_loss":%s,"test_loss":%s'
        form=$form',"valid_tokens":%s,"test_tokens":%s,"seconds":%d,"seconds_per_100_steps":%.2f'
        form=$form',"precision":"%s","commit":"%s","machine":"%s"}\n'
        printf "$form" \
            "$name" "$seed" "$steps" "$tokens" "$string" "$order" "$attend" "$blocks" "$params" \
            "$(field loss "$run.valid")" "$(field loss "$run.test")" \
            "$(field tokens "$run.valid")" "$(field tokens "$run.test")" "$seconds" \
            "$(awk -v s="$seconds" -v n="$steps" -v u="$unknown" '
                BEGIN { print u + 0 ? 0 : 100 * s / n }')" "$precision" "$commit" \
            "$cpu, $cores cores" >"$run.json.new"
        grep -q '"valid_loss":[0-9.]*,"test_loss":[0-9.]*,' "$run.json.new" ||
            { echo "par.sh: $run.eval does not contain the results of a run" >&2; exit 1; }
        mv "$run.json.new" "$run.json"
        rm -f "$run.valid" "$run.test"
        [ -n "$keep" ] || rm -f "$run.safetensors"
        awk -v v="$(field valid_loss "$run.json")" -v t="$(field test_loss "$run.json")" \
            -v s="$seconds" '
            BEGIN {
                printf "      loss per token: %.4f validation, %.4f test; %d processor s\n", v, t, s
            }'
    done
    case " $names " in *" times "*) wanted=1 ;; *) wanted= ;; esac
    if [ -n "$wanted" ] && [ ! -s "$out/times.json" ]; then
        echo "$(date +%H:%M) times .."
        short=100 long=1600
        [ -z "$quick" ] || long=400
        : >"$out/times.new"
        # networks of one step: the time does not depend on what they have learnt
        for name in found xl par; do
            describe "$name"
            rm -f "$out/time.$name.safetensors"
            "$out/train_par" $model $train --steps 1 --pattern "$pattern" --data "$data" $lists \
                --threads "$threads" --checkpoint "$out/time.$name.safetensors" \
                >"$out/time.txt" 2>"$out/time.err" || { tail -n 1 "$out/time.err" >&2; exit 1; }
        done
        round=0
        while [ $round -lt $rounds ]; do
            round=$((round + 1))
            for name in found par; do
                "$out/train_par" --checkpoint "$out/time.$name.safetensors" --no-train --race xl \
                    --data "$data" --threads "$threads" >"$out/time.txt" 2>"$out/time.err" ||
                    { tail -n 1 "$out/time.err" >&2; exit 1; }
                # "race, ..: A and B against C and D of ..": tokens/s in training and
                # evaluation
                v='\([0-9.a-zA-Z]*\)'
                sed -n "s|^race, .*: $v and $v against $v and $v of .*|race $name \1 \2 \3 \4|p" \
                    "$out/time.txt" >>"$out/times.new"
            done
            for name in found xl par; do
                for n in $short $long; do
                    seconds
                    before=$now
                    "$out/train_par" --checkpoint "$out/time.$name.safetensors" --no-train \
                        --generate "$n" --seed 1 --threads "$threads" \
                        >"$out/time.txt" 2>"$out/time.err" ||
                        { tail -n 1 "$out/time.err" >&2; exit 1; }
                    seconds
                    echo "generate $name $n $((now - before))" >>"$out/times.new"
                done
            done
        done
        rm -f "$out"/time.*.safetensors "$out/time.txt" "$out/time.err"
        awk -v each=$((batch * segment)) -v threads="$threads" -v precision="$precision" \
            -v commit="$commit" -v machine="$cpu, $cores cores" \
            -v pattern="$(text pattern "$out/search.json")" '
            function tokens(s) { return s ~ /k$/ ? s * 1000 : s ~ /M$/ ? s * 1000000 : s + 0 }
            function keep(name, x) { value[name, ++n[name]] = x }
            function median(name, i, j, t, m) {
                m = n[name]
                for (i = 2; i <= m; i++)
                    for (j = i; j > 1 && value[name, j] < value[name, j - 1]; j--) {
                        t = value[name, j]
                        value[name, j] = value[name, j - 1]
                        value[name, j - 1] = t
                    }
                return m % 2 ? value[name, (m + 1) / 2] \
                    : (value[name, m / 2] + value[name, m / 2 + 1]) / 2
            }
            $1 == "race" {
                keep($2 " step", 1000 * each / tokens($3))
                keep($2 " eval", 1000 * each / tokens($4))
                keep("xl step", 1000 * each / tokens($5)); keep("xl eval", 1000 * each / tokens($6))
                keep($2 " step_to_xl", tokens($5) / tokens($3))
                keep($2 " eval_to_xl", tokens($6) / tokens($4))
            }
            $1 == "generate" {
                if (!($2 in first)) { first[$2] = $3; low[$2] = $4; next }
                keep($2 " token", 10 * ($4 - low[$2]) / ($3 - first[$2]))
                delete first[$2]
            }
            END {
                if (n["xl step"] < 2 || n["xl token"] < 1) exit 1
                m = split("found xl par", name, " ")
                printf "{\"network\":\"times\",\"pattern\":\"%s\",\"rounds\":%d,\"threads\":%d",
                    pattern, n["xl token"], threads
                for (i = 1; i <= m; i++) {
                    printf ",\"%s_step_ms\":%.2f,\"%s_eval_ms\":%.2f,\"%s_token_ms\":%.4f", name[i],
                        median(name[i] " step"), name[i], median(name[i] " eval"), name[i],
                        median(name[i] " token")
                    if (name[i] != "xl")
                        printf ",\"%s_step_to_xl\":%.4f,\"%s_eval_to_xl\":%.4f", name[i],
                            median(name[i] " step_to_xl"), name[i], median(name[i] " eval_to_xl")
                }
                printf ",\"precision\":\"%s\",\"commit\":\"%s\",\"machine\":\"%s\"}\n", precision,
                    commit, machine
            }' "$out/times.new" >"$out/times.json.new" || {
            echo "par.sh: $out/times.new does not contain the times of all networks" >&2
            exit 1
        }
        mv "$out/times.json.new" "$out/times.json"
    fi
fi

. bench/machine.sh
all=
for name in search found xl par times; do
    for f in "$out/$name.json" "$out/$name".[0-9]*.json; do
        if [ -s "$f" ]; then all="$all $f"; fi
    done
done
[ -n "$all" ] || refuse "no run in $out is done"
words_in() { [ ! -r "$out/text/$1.txt" ] || tokens "$out/text/$1.txt"; }
{
    echo "# Orders of blocks, $(date +%Y-%m-%d)"
    echo
    where=$(for f in $all; do
        printf ' %s, %s;\n' "$(text machine "$f")" "$(text commit "$f")"
    done | sort -u | tr -d '\n')
    echo "- machine and commit of the runs:$where"
    echo "- command of this report: \`$command\`"
    echo "- settings, checksums and sizes of the texts: \`$(cat "$out/settings")\`"
    awk -v valid_words="$(words_in valid)" -v test_words="$(words_in test)" -v inherit="$inherit" '
        function text(key) {
            return match($0, "\"" key "\":\"[^\"]*") \
                ? substr($0, RSTART + length(key) + 4, RLENGTH - length(key) - 4) : ""
        }
        function number(key) {
            return match($0, "\"" key "\":[-+0-9.e]*") \
                ? substr($0, RSTART + length(key) + 3, RLENGTH - length(key) - 3) + 0 : 0
        }
        function figure(loss) { return tokens == "bytes" ? loss / log(2) : exp(loss) }
        function add(key, x) { sum[key] += x; square[key] += x * x }
        function variance(key, k, v) {
            if (k < 2) return 0
            v = (square[key] - sum[key] * sum[key] / k) / (k - 1)
            return v > 0 ? v : 0
        }
        function cell(key, k) {
            if (k < 2) return sprintf("%.*f", digits, sum[key] / k)
            return sprintf("%.*f +- %.*f", digits, sum[key] / k, digits, sqrt(variance(key, k)))
        }
        # d: difference of two means; half: half of its 95 % interval (Student, equal
        # variances)
        function compare(a, b, what, k, m, v) {
            k = n[a]; m = n[b]; d = sum[a, what] / k - sum[b, what] / m
            half = -1
            if (k + m < 3 || k < 2 && m < 2) return
            v = (k - 1) * variance(a SUBSEP what, k) + (m - 1) * variance(b SUBSEP what, m)
            v /= k + m - 2
            half = student[k + m - 2 > 10 ? 10 : k + m - 2] * sqrt(v * (1 / k + 1 / m))
        }
        function percent(x, was) { return sprintf("%+.1f %%", 100 * (x / was - 1)) }
        BEGIN { split("12.71 4.30 3.18 2.78 2.57 2.45 2.36 2.31 2.26 2.23", student, " ") }
        text("network") == "search" {
            printf "- search: %s, %s, %d %% of the time of xl by its table", text("pattern"),
                text("how"), number("time_to_xl")
            printf " (attention, feed-forward: %s ms); the likeliest string: %s;",
                text("latency_table"), text("likeliest")
            printf " %d processor s\n", number("seconds")
            found = text("pattern"); next
        }
        text("network") == "times" {
            timed = 1
            m = split("found xl par", name, " ")
            for (i = 1; i <= m; i++) {
                a = name[i]; step[a] = number(a "_step_ms"); evaluation[a] = number(a "_eval_ms")
                token[a] = number(a "_token_ms")
                to[a] = number(a "_step_to_xl"); eval_to[a] = number(a "_eval_to_xl")
            }
            rounds = number("rounds"); threads = number("threads"); next
        }
        {
            a = text("network"); tokens = text("tokens")
            if (!(a in n)) order[++names] = a
            n[a]++; pattern[a] = text("pattern"); in_words[a] = text("order")
            attention[a] = number("attention"); blocks = number("blocks")
            params[a] = number("parameters")
            v = number("valid_loss"); t = number("test_loss"); all_valid = number("valid_tokens")
            all_test = number("test_tokens")
            add(a SUBSEP "valid", figure(v)); add(a SUBSEP "test", figure(t))
            if (number("seconds_per_100_steps") > 0) {
                seconds[a] += number("seconds_per_100_steps")
                known[a]++
            }
            word_valid[a] += valid_words ? exp(v * all_valid / valid_words) : 0
            word_test[a] += test_words ? exp(t * all_test / test_words) : 0
        }
        END {
            unit = tokens == "bytes" ? "bits per byte" \
                : "perplexity of a " (tokens == "words" ? "word" : "piece")
            digits = tokens == "bytes" ? 4 : 2
            if (!names) exit
            if (inherit) print "- all networks began with the weights of the search"
            for (j = 1; j <= names; j++) {
                a = order[j]
                if (in_words[a] != "") printf "- %s is %s: %s\n", a, pattern[a], in_words[a]
            }
            printf "\n%s, mean over seeds +- their standard deviation.",
                toupper(substr(unit, 1, 1)) substr(unit, 2)
            if (tokens != "bytes")
                printf " Per word, with line ends: the same loss, comparable for all tokens."
            printf " Step: forward and backward of a batch, wall clock,"
            if (timed) printf " %d rounds alternating with xl, %d threads.\n", rounds, threads
            else printf " not measured yet.\n"
            print "Token: processor time per generated token. Processor s: of whole trainings.\n"
            printf "| network | blocks | attention | parameters | seeds | valid | test |"
            if (tokens != "bytes") printf " valid, per word | test, per word |"
            printf " step ms | to xl | evaluation, to xl | token ms | to xl |"
            print " processor s per 100 steps |"
            printf "|---|---|--:|--:|--:|--:|--:|%s--:|--:|--:|--:|--:|--:|\n",
                tokens == "bytes" ? "" : "--:|--:|"
            for (j = 1; j <= names; j++) {
                a = order[j]
                k = n[a]
                printf "| %s | %s | %d of %d | %.2fM | %d | %s | %s |", a, pattern[a], attention[a],
                    blocks, params[a] / 1000000, k, cell(a SUBSEP "valid", k),
                    cell(a SUBSEP "test", k)
                if (tokens != "bytes")
                    printf((valid_words ? " %.1f | %.1f |" : " - | - |"), word_valid[a] / k,
                        word_test[a] / k)
                if (timed)
                    printf(" %.1f | %s | %s | %.3f | %s |", step[a],
                        a == "xl" ? "1" : sprintf("%.2f", to[a]),
                        a == "xl" ? "1" : sprintf("%.2f", eval_to[a]), token[a],
                        a == "xl" ? "1" \
                            : token["xl"] > 0 ? sprintf("%.2f", token[a] / token["xl"]) : "-")
                else printf " - | - | - | - | - |"
                if (known[a]) printf " %.1f |\n", seconds[a] / known[a]; else printf " - |\n"
            }
            for (j = 1; j <= names; j++) {
                a = order[j]
                if (a == "xl" || !("xl" in n)) continue
                compare(a, "xl", "test"); dt = d; ht = half
                compare(a, "xl", "valid")
                base = sum["xl", "valid"] / n["xl"]
                printf "\n%s has %d attentions where xl has %d, and %.2f times its parameters.",
                    a, attention[a], attention["xl"], params[a] / params["xl"]
                printf " Its validation %s is %.*f %s than that of xl (%s),", unit, digits,
                    d < 0 ? -d : d, d < 0 ? "lower" : "higher", percent(base + d, base)
                printf " on the test text %.*f %s.\n", digits, dt < 0 ? -dt : dt,
                    dt < 0 ? "lower" : "higher"
                if (half < 0) {
                    print "There are too few seeds to say whether the difference is significant."
                } else {
                    printf("The 95 %% intervals of the differences are +- %.*f and +- %.*f:",
                        digits, half, digits, ht)
                    what = "not significant"
                    if (d - half > 0) what = "a significant loss"
                    if (d + half < 0) what = "a significant gain"
                    print " on the validation text the difference is " what "."
                }
                if (timed) {
                    line = sprintf("A training step takes %.0f %% of the time of xl,", 100 * to[a])
                    line = line sprintf(" an evaluation %.0f %%", 100 * eval_to[a])
                    if (token["xl"] > 0)
                        line = line sprintf(", a generated token %.0f %%",
                            100 * token[a] / token["xl"])
                    if (half < 0) verdict = ""
                    else if (to[a] >= 0.98) verdict = " It saves no training time here."
                    else if (d - half > 0) verdict = " It trades quality for time."
                    else if (d + half < 0) verdict = " It is faster and better here."
                    else verdict = " It is faster, without a significant difference in quality."
                    print line "." verdict
                }
            }
            if (("found" in n) && found != "" && ("par" in n) && pattern["found"] == pattern["par"])
                print "\nThe search found the rule itself: found and par are one network."
            printf "\n(The paper: on WikiText-103, 32 blocks of width 512, 35 %% less time at the"
            print " perplexity of Transformer-XL, with 6 attentions instead of 16.)"
        }' $all
} >"$out/report.md"
cat "$out/report.md"
[ -z "$record" ] || record par $all
