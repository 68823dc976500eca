# trainer_par.sh - the parts of trainer.sh for train_par: options, presets, and
# checks of this family only.

# a search of two blocks; the times of its blocks are given, not measured, so that runs
# repeat
base_preset=demo
sizes="--nlayers 2 --hid-sz 16 --inner-hid-sz 32 --nheads 2 --block-sz 16 --mem 16 --batch-sz 4"
sizes="$sizes --batch-split 1 --sample-every 0 --threads 1 --latency-table 2,1 --schedule constant"
sizes="$sizes --eval-every 0 --save-every 0 --log-every 10"
trained="--batch-split 2 --dropout 0.2 --lr 0.01 --lr-warmup 20 --tau-steps 100 --arch-from 5"
trained="$trained --arch-share 0.2 --arch-every 3 --noise sequence"
adapts=no
steps_matter=no
long_more="--eval-every 50 --sample-every 60 --sample-prime 8 --sample-length 4"
no_cadence="--save-every 0"
no_evaluation="--eval-every 0"
state_names='"\(arch\.\)*memory\.[01]\.[a-z.0-9]*"' states=8
kills_at_times=2 kills_at_calls=2 spoiled_bytes=8
learning="--pattern (sf)1 --hid-sz 32 --inner-hid-sz 64 --lr 0.005 --grad-clip 1"
whole_evaluations=
wild_more=
words_more="--pattern sf --words-out adaptive --adaptive-in --tied --tie-projs all --cutoffs 5,12"
words_more="$words_more --div-val 2"
words_figures=word_ppl,batch_ppl,
train_keys=event,step,loss,bpb,lr,grad_norm,tokens_per_s,seconds,peak_bytes,tau,latency,pi
learned='^architecture: '
another_preset=enwik8
sizes_above_0="nlayers hid-sz nheads block-sz batch-sz batch-split update-every"
too_much="--block-sz 512 --max-memory 0.006"
too_much_eval="--eval-batch-sz 150 --max-memory 0.0015"
token_by_token="--eval-block-sz 1"      # a block sees more of its past than a token in generation
tune_more="--tau-steps 100"
local_options="checkpoint init-from grow-vocab export"
local_options="$local_options score score-by best log tensorboard inherit derive"
local_options="$local_options derive-samples race picture eval-only no-train threads device gpu"
local_options="$local_options tune no-graph max-memory dry-run vocab list-presets version generate"
local_options="$local_options prompt temperature top-k top-p repetition-penalty repetition-window"
local_options="$local_options stop interactive keep-best out weights shard literal"
# old: a tiny model after 30 steps of --preset demo, by the first version; no
# checkpoint of it lacks options
old_options='"lr":0.003,"schedule":"cosine",.*"grad-clip":1,' old_loss=2.6941695914548984
old_given=
# for tests/trainers/trainer_cuda.sh
cuda_model="--nlayers 2 --hid-sz 16 --inner-hid-sz 32 --nheads 2 --mem 16 --batch-split 1 --lr 0.01"
cuda_model="$cuda_model --latency-table 2,1 --arch-from 0"
cuda_note=

# name, million parameters, parameters, blocks, d
presets() {
    cat <<END2
demo 1.4 1350912 6 128
demo-found 0.7 708480 6 128
reference 3.0 3023658 6 128
par-search 246.5 246549978 32 512
par-base 199.8 199840218 32 512
par-large 319.8 319826810 36 1024
par-enwik8 47.4 47367885 24 512
par-text8 47.3 47277084 24 512
enwik8 41.1 41055949 24 512
enwik8-large 277.2 277232845 48 1024
text8 277.1 277051420 48 1024
wt103-base 151.1 151107538 32 410
wt103-large 285.2 285170506 36 1024
lm1b-large 841.3 841295982 48 1280
nvidia-base 192.0 191950298 32 512
nvidia-large 285.2 285167482 36 1024
fairseq 151.1 151107538 32 410
END2
}
parameters() { sed -n 's/^\([0-9]*\) parameters.*/\1/p' out; }
family_presets() {
    # the reference also counts the 3 values of each block's gate
    good "the reference" . --preset reference --dry-run
    check "the reference's base_model.sh has 3,023,676 parameters" \
        [ $(($(parameters) + 18)) -eq 3023676 ]
    check "the reference: its shape" \
        grep -q '^a search of 6 blocks, 18 gate parameters, 4 heads, segment 32, memory 16$' out
    good "enwik8 with the 204 bytes of its authors" . --preset enwik8 --vocab 204 --dry-run
    check "enwik8 has the authors' 41,055,436 parameters" [ "$(parameters)" -eq 41055436 ]
    good "par:5 of 32" . --preset par-base --dry-run
    check "par:5 of 32: six attention blocks" \
        [ "$(grep -c '^32 blocks (sfff)6f8: \|^6 of them attention with 8 heads' out)" -eq 2 ]
    good "par:5 of 36" . --preset par-large --dry-run
    check "par:5 of 36: seven attention blocks" \
        [ "$(grep -c '^36 blocks (sff)7f15: \|^7 of them attention with 16 heads' out)" -eq 2 ]
    # a pattern in words, with its repetitions
    while IFS='|' read -r pattern short words; do
        good "--pattern $pattern" . --pattern "$pattern" --dry-run
        check "--pattern $pattern: expected $words, got: $(sed -n 2p out)" \
            grep -q "^[0-9]* blocks* $short: $words;$" out
    done <<END2
s5f|s5f|5 attention, 1 feed-forward
sf5|sf5|1 attention, 5 feed-forward
s2s3f|s5f|5 attention, 1 feed-forward
fs4f|fs4f|1 feed-forward, 4 attention, 1 feed-forward
(sff)4f3|(sff)4f3|4 x (1 attention, 2 feed-forward), 3 feed-forward
f3s(sf)3ff|f3s(sf)3ff|3 feed-forward, 1 attention, 3 x (1 attention, 1 feed-forward), 2 feed-forward
(s2i)3|(ssi)3|3 x (2 attention, 1 identity)
i|i|1 identity
END2
    # With d = 512 a feed-forward has 2,099,712 parameters and an attention 5 d^2: the
    # networks of the paper have more than Transformer-XL.
    good "alternative names of options" . --d-model 32 --num_heads 2 --d-ffn 64 --num-layers 4 \
        --pattern search --mem-len 8 --tgt-len 8 --dropout-rate 0.2 --max-lr 0.1 \
        --warmup-steps 5 --clipvalue 1 --dry-run
    check "alternative names of options are accepted" \
        grep -q '^a search of 4 blocks, 12 gate parameters, 2 heads, segment 8, memory 8$' out
}
family_variants() {
    variant "a fixed pattern, several steps an update" --data ../t.txt $tiny --pattern "sfi(s)2" \
        --dropout 0.2 --attn-dropout 0.1 --optim muon --lr 0.01 --update-every 3 --update-after 20
    variant "one optimiser for all, as the reference" --data ../t.txt $tiny --lr 0.01 \
        --arch-optim same --arch pi --tau-form factor --tau-steps 100 --straight-through \
        --sines reference --pos-mode reference --full-scale --attn-relu --biases --own-uv \
        --norm-eps 0.001 --init reference --eps 0.0000001 --eps-hat --clip-value 0.5 \
        --reading records --gate-eval noise
    variant "lamb, turned streams, norm before, learned positions" --data ../t.txt $tiny \
        --pattern xl --optim lamb --lr 0.01 --reading roll --norm-before --positions learned
    variant "the original's pre-norm, bias of distances, one projection" --data ../w.txt $tiny \
        --tokens words --pattern xl --lr 0.01 --dropout 0.2 --batch-split 2 --norm-before \
        --no-final-norm --positions learned-bias --own-uv --words-out adaptive --adaptive-in \
        --tied \
        --tie-projs but-first --cutoffs 5,12 --div-val 1 --emb-sz 8 --one-proj
    variant "groups of streams" --data ../t.txt $tiny --pattern "(sf)2" --lr 0.01 --streams 16
    variant "noise by runs of tokens, fbnet, random pieces" --data ../t.txt $tiny --lr 0.01 \
        --noise tokens --noise-tokens 5 --latency fbnet --latency-of w --random-segments 4 \
        --tau-steps 100
    variant "words in clusters" --data ../w.txt $full --tokens words --words-out reference \
        --cutoffs 5,12 --proj-dims 4,2
}
probabilities() { events "$1" | tail -n 1 | sed 's/.*"pi":\[\([^]]*\)\].*/\1/'; }
# build/spm_train, if the trainer is built with SentencePiece
pieces_trained() {
    spm=${bin%/*}/spm_train
    awk 'BEGIN {
        split("ba ke lo mi nu ra si to", syllable)
        for (i = 0; i < 400; i++) {
            printf "In %d", 1900 + i % 90
            for (k = 1; k < 9; k++)
                printf "%s%s", k % 2 ? " " : "", syllable[1 + (i * k * k + k * 5 + int(i / 7)) % 8]
            print " @-@ " i * i % 997
        }
    }' >ships.txt
    for more in "" --split-digits; do
        n=60; [ -z "$more" ] || n=45
        "$spm" --text ships.txt --model "ships$more" --vocab $n --threads 1 $more >out 2>err; rc=$?
        check "spm_train $more writes a model: $(cat err)" [ $rc -eq 0 -a -s "ships$more.model" ]
        check "spm_train $more: $n pieces" [ "$(wc -l <"ships$more.vocab")" -eq $n ]
        check "spm_train $more: the first pieces are the reference's" \
            [ "$(head -n 5 "ships$more.vocab" | cut -f 1 | tr '\n' ' ')" \
            = "[PAD] [BOS] [EOS] [UNK] @-@ " ]
        "$spm" --model "ships$more" --encode ships.txt >"ids$more" 2>err; rc=$?
        check "spm_train $more: the text in pieces, line by line: $(cat err)" \
            [ $rc -eq 0 -a "$(wc -l <"ids$more")" -eq 400 ]
    done
    check "years are pieces" [ "$(cut -f 1 ships.vocab | grep -c '19[0-9]')" -gt 0 ]
    check "--split-digits: digits are pieces" \
        [ "$(cut -f 1 ships--split-digits.vocab | grep -c '[0-9].*[0-9]')" -eq 0 ]
    good "a text of those pieces" search --data ../ships.txt $tiny --tokens spm \
        --pieces ../ships.model --steps 3 --checkpoint spm.st
    good "the same text as ids" search --data ../ids $tiny --tokens ids --pieces ../ships.vocab \
        --steps 3
    for bad in "" "--model m" "--text ships.txt" "--model m --text nothing --vocab 45" \
        "--model m --encode ships.txt" "--model m --text ships.txt --vocab 4" \
            "--model m --text ships.txt --encode ships.txt"; do
        "$spm" $bad >out 2>err; rc=$?
        check "spm_train $bad is refused in one line: $(cat err)" \
            [ $rc -eq 2 -a ! -s out -a "$(grep -c '^spm_train: ' err)" -eq 1 ]
    done
}
family_more() {
    mkdir search
    data="--data ../t.txt"
    good "a search" search $data $tiny --lr 0.01 --arch-lr 0.05 --tau-steps 100 --tau-end 0.1 \
        --arch-from 40 --steps 100 --checkpoint run.st --log log.jsonl --picture pi.svg
    check "a search: the gates stay for 40 steps" \
        [ "$(events search/log.jsonl | grep '"step":\(10\|40\),' | grep -c "pi\":.0.3[23]")" -eq 2 ]
    check "a search: then the gates change" \
        [ "$(probabilities search/log.jsonl | grep -c '^0.33[0-9]*,0.33')" -eq 0 ]
    check "a search: the gates of each block sum to 1" \
        awk -v p="$(probabilities search/log.jsonl)" \
        '
            BEGIN {
                n = split(p, v, ",")
                for (i = 1; i <= n; i += 3) {
                    e = v[i] + v[i+1] + v[i+2] - 1
                    if (!(e * e < 1e-10)) exit 1
                }
                exit n != 6
            }'
    check "a search: the temperature falls from 1 to a tenth" \
        awk -v a="$(events search/log.jsonl | head -n 1 | field tau)" \
        -v b="$(events search/log.jsonl | tail -n 1 | field tau)" \
        'BEGIN { exit !(a > 0.8 && a < 0.9 && b > 0.1 && b < 0.11) }'
    check "a search: the expected time is that of the table" \
        awk -v t="$(events search/log.jsonl | head -n 1 | field latency)" \
        'BEGIN { e = t - 2 * 0.33 * 3; exit !(e < 1e-5 && -e < 1e-5) }'
    check "the picture has one panel per block, with two areas above a third" \
        [ "$(grep -c '<polygon' search/pi.svg)" -eq 4 \
        -a "$(grep -c '^<rect.*#D9D9D9' search/pi.svg)" -eq 2 \
        -a "$(grep -c '>block [12]<' search/pi.svg)" -eq 2 ]
    check "the picture has a point for each of ten records, and two corners" \
        [ "$(grep -m 1 '<polygon' search/pi.svg | tr ' ' '\n' | grep -c ',')" -eq 12 ]
    good "--derive" search $data --checkpoint run.st --derive --derive-samples 5 \
        --eval-blocks 4 --threads 1
    cp out found
    check "--derive: the most probable pattern first" \
        [ "$(head -n 2 found | tail -n 1 | grep -c '^argmax  *[sfi0-9]*  bpb [0-9.]*')" -eq 1 ]
    check "--derive: five samples" \
        [ "$(grep -c '^sample [1-5]  *[sfi0-9]*  bpb [0-9.]*  [0-9]* % of Transformer-XL' found)" \
        -eq 5 ]
    check "--derive: the best" grep -q '^best: [sfi0-9]*: [-a-z0-9, ]*$' found
    good "--derive again" search $data --checkpoint run.st --derive --derive-samples 5 \
        --eval-blocks 4 --threads 1
    check "--derive again: the same result" cmp found out
    good "a new run with the weights of the search" search $data --init-from run.st --steps 1 \
        --lr 0 --arch-from 9 --log tuned.jsonl --threads 1
    check "a new run with the weights of the search has its gates" \
        [ "$(probabilities search/tuned.jsonl)" = "$(probabilities search/log.jsonl)" ]
    # the network alone is the search with one-hot gates
    best=$(sed -n 's/^argmax  *\([sfi0-9]*\) .*/\1/p' found)
    good "a network of the best pattern inherits the weights" search $data $tiny --pattern "$best" \
        --inherit run.st --steps 1 --lr 0 --eval-blocks 4 --checkpoint found.st
    check "the network has the loss of the search: $(sed \
        -n 's/^step 1: valid bpb \([0-9.]*\) .*/\1/p' out)" \
        [ "$(sed -n 's/^step 1: valid bpb \([0-9.]*\) .*/\1/p' out)" \
        = "$(sed -n 's/^argmax .* bpb \([0-9.]*\).*/\1/p' found)" ]
    mv out trained
    run . --pattern "$best" --dry-run
    words=$(sed -n 's/^2 blocks [^:]*: \([^;]*\);.*/\1/p' out)
    check "the results have '$words' with $best" grep -q "^architecture: $best: $words$" trained
    check "--derive has the words of the best pattern" \
        grep -q "^architecture: $best: $words; expected" found
    check "--derive has the words of a candidate" grep -q "^argmax .*  ($words)$" found
    check "the log of the search has them" \
        grep -q "\"architecture\",.*\"$best\",\"blocks\":\"$words\"}" search/log.jsonl
    good "--race" search $data --checkpoint found.st --no-train --race xl --threads 1
    check "--race: the message has the speedup" \
        grep -q '^race, .* of sf: 1 attention, 1 feed-forward; [0-9.]* and [0-9.]* times as fast$' \
        out
    cp search/found.st search/keep.st
    good "the network resumes, and does not inherit again" search $data $tiny --pattern "$best" \
        --inherit run.st --steps 2 --lr 0 --checkpoint found.st
    check "the network resumes: step 2" [ "$(meta search/found.st step)" = 2 ]
    good "times are measured if none are given" search $data $tiny --latency-table= --steps 2 \
        --log measured.jsonl --checkpoint measured.st
    check "measured times are stored" \
        [ "$(header search/measured.st | grep -c '\\"latency-table\\":\\"[0-9.e-]*,[0-9.e-]*\\"')" \
        -eq 1 ]
    # epochs
    good "two epochs of records" search $data $tiny --reading records --epochs 2 --steps 0 \
        --log epochs.jsonl
    n=$(steps_of search/epochs.jsonl | tail -n 1) size=$(($(wc -c <t.txt)))
    check "two epochs of records: $n steps" \
        [ "$n" -eq $((2 * (size * 9 / 10 / 17 - 3 * (size * 9 / 10 / 17 / 4)))) ]
    # cutoffs for counts like Zipf's: ids by falling count, and in any order with --sort
    cuts=${bin%/*}/cuts
    awk 'BEGIN { for (r = 0; r < 12000; r++) printf "%d\n", 1e9 / (r + 2.7) }' >counts.txt
    check "cuts by the cost of the reference: $("$cuts" --counts counts.txt --clusters 4 \
        --cost reference 2>/dev/null)" \
        [ "$("$cuts" --counts counts.txt --clusters 4 --cost reference 2>/dev/null)" \
        = 434,2423,6268 ]
    check "cuts by multiply-adds: 25 and 753 are the best" \
        [ "$("$cuts" --counts counts.txt --clusters 3 --dim 128 --against 26,748 2>err)" = 25,753 ]
    check "cuts: better than 26 and 748, and than one softmax: $(cat err)" \
        awk '{ v[NR] = $2 } END { exit !(v[1] < v[2] && v[2] < v[3] && v[3] == 1.536e+06) }' err
    check "cuts by measured time" \
        [ "$("$cuts" --counts counts.txt --clusters 2 --cost time --threads 1 --rows 64 \
        --dim 64 2>/dev/null | grep -c '^[1-9][0-9]*$')" -eq 1 ]
    sort -R counts.txt >mixed.txt
    check "cuts with --sort" \
        [ "$("$cuts" --counts mixed.txt --sort --clusters 3 --dim 128 2>/dev/null)" = 25,753 ]
    echo "0 0 0 0 0 0 1 1 1 2 0 2 3" >few.ids
    check "cuts from a text: 7 and 3 to the head, by hand" \
        [ "$("$cuts" --ids few.ids --clusters 2 --dim 1 --factor 1 2>/dev/null)" = 2 ]
    for option in ids counts; do
        { printf '\357\273\277'; cat few.ids; } >marked.ids
        "$cuts" --$option few.ids --clusters 2 --dim 1 --factor 1 >want 2>err
        check "cuts --$option: a byte-order mark is skipped: $(cat err)" \
            [ -s want -a "$("$cuts" --$option marked.ids --clusters 2 --dim 1 --factor 1 2>err)" \
            = "$(cat want)" ]
    done
    { printf '\357\273'; cat few.ids; } >marked.ids
    # the same as words: <eos> first, then by falling count: 6 a, 3 b, 2 c, 2 d
    printf 'a a a b a c\nb a d a c b d\n' >few.txt
    check "cuts from words, including <eos>" \
        [ "$("$cuts" --text few.txt --clusters 2 --dim 1 --factor 1 --against 2 2>err)" = 3 ]
    check "cuts from words: shares of 11 and 8 of 15: $(cat err)" \
        [ "$(grep -c 'share of the text: \(0.733 0.267\|0.533 0.467\)$' err)" -eq 2 ]
    check "cuts from characters" \
        [ "$("$cuts" --text few.txt --tokens chars --clusters 2 --dim 1 --factor 1 2>/dev/null)" \
        -gt 0 ]
    for bad in "--text none" "--text ." "--text few.txt --vocab 3" "--ids few.ids --tokens words" \
        "--text few.txt --ids few.ids" "--counts nothing" "--counts json.awk" \
        "--ids counts.txt --vocab 5" "--counts few.ids --clusters 9" \
        "--counts few.ids --clusters 2 --proj-dims 1,2" "" \
            "--counts few.ids --ids few.ids" "--counts few.ids --against 5,3" \
            "--ids marked.ids --clusters 2" \
            "--ids few.ids --clusters 5"; do
        "$cuts" $bad >out 2>err; rc=$?
        check "cuts $bad is refused in one line: $(cat err)" \
            [ $rc -eq 2 -a ! -s out -a "$(wc -l <err)" -eq 1 ]
    done
    if [ -w /dev/full ]; then
        for what in --help "--ids few.ids --clusters 2 --dim 1 --factor 1"; do
            "$cuts" $what 2>err >/dev/full; rc=$?
            check "cuts $what: output that cannot be written: exit code 1, got $rc" [ $rc -eq 1 ]
        done
    fi
    [ "$("$bin" --data t.txt --tokens spm --pieces t.txt 2>&1 | grep -c SENTENCEPIECE=1)" \
          -eq 1 ] || pieces_trained
    # ids of pieces
    printf '<unk>\t0\n</s>\t0\n\342\226\201a\t-1\nb\t-2\n\342\226\201c\t-3\n' >list.vocab
    awk 'BEGIN { for (i = 0; i < 300; i++) print i % 2 ? "2 3 4" : "4 3 2 1" }' >ids.txt
    good "a text of ids" search --data ../ids.txt $tiny --tokens ids --pieces ../list.vocab \
        --steps 40 --checkpoint ids.st --generate 6 --prompt "2 3" --temperature 0
    check "a text of ids: samples are decoded: $(cat out)" grep -q '^ *ab' out
    good "a text of ids: resumes without the list" search --data ../ids.txt --checkpoint ids.st \
        --steps 41 --threads 1
    check "perplexity per token and per word, means over batches" \
        grep -q 'valid ppl [0-9.]* (loss [0-9.]*, [0-9.]* per word, mean of batches [0-9.]*)' out
}
# options that a checkpoint decides, with another value
fixed_options() {
    cat <<END2
--nlayers 3
--pattern sf
--hid-sz 32
--inner-hid-sz 64
--nheads 4
--head-sz 4
--block-sz 32
--mem 8
--positions learned
--clamp-len 5
--same-length
--norm-before
--no-final-norm
--norm-eps 0.1
--own-uv
--biases
--init reference
--init-std 0.5
--proj-init-std 0.5
--words-out adaptive
--adaptive-in
--tied
--tie-projs all
--one-proj
--cutoffs 5,6
--div-val 2
--proj-factor 2
--proj-dims 4,2
--emb-sz 8
--emb-scale 2
--pad-id 0
--divide-all
--arch pi
--straight-through
--noise tokens
--noise-tokens 4
--arch-optim sgd
--arch-share 0.5
--latency none
--latency-of w
--sines reference
--pos-mode fixed
--full-scale
--attn-relu
--optim adamw
--momentum 0.5
--eps 0.1
--eps-hat
--batch-sz 8
--batch-split 4
--reading roll
--random-segments 2
--tokens chars
--min-count 3
--join-lines
--precision bf16
END2
}
# sed scripts that keep the length of a checkpoint's header
spoils() {
    cat <<'END2'
s/seqtx.par\.1"/seqtx.par.9"/
s/\\"nlayers\\":2/\\"nlayers\\":3/
s/\\"hid-sz\\":16/\\"hid-sz\\":24/
s/\\"nheads\\":2/\\"nheads\\":3/
s/\\"pattern\\":\\"search\\"/\\"pattern\\":\\"sxarch\\"/
s/\\"batch-sz\\":4/\\"batch-sz\\":8/
s/\\"block-sz\\":16/\\"block-sz\\":00/
s/"memory\.0\.mem\./"memory.0.men./
s/"arch\.optim\.kind":"[0-9]"/"arch.optim.kind":"1"/
s/"arch\.position"/"arch.positiom"/
s/"arch\.0":/"arch.9":/
s/"optim.kind":"[0-9]"/"optim.kind":"1"/
s/^{/[/
s/"F32"/"F33"/
s/"step":"6"/"step":"x"/
s/"config":"{/"config":"[/
s/"vocab"/"vocaa"/
s/.$/]/
END2
}
family_bad() {
    refused '--literal: Transformer-XL and PAR have no literal forms: .*--schedule xl-cosine' \
        $t $tiny $new --literal
    refused '--literal: Transformer-XL and PAR have no literal forms' $t $tiny $new --literal rows
    refused '--latency-power: expected 0 unless --latency fbnet, got 2' \
        $t $tiny $new --pattern search --latency add --latency-power 2
    for more in "tau-start 3" "arch-lr 1" "latency add" "noise sequence" "gate-eval soft" \
        straight-through "picture p.svg"; do
        refused "--${more%% *} is only for a search: the pattern sf is fixed" \
            $t $tiny $new --pattern sf --$more
    done
    for more in "generate 5" "sample-every 2"; do
        refused "--${more%% *} with --gate-eval noise" \
            $t $tiny $new --pattern search --gate-eval noise --$more
    done
    refused "--score-by with --gate-eval noise" \
        --checkpoint good.st --score t.txt --score-by lines --gate-eval noise
    refused "--inherit and --init-from" $t $new --init-from good.st --inherit good.st
    refused "--pattern: expected letters .*, got ''" $t $tiny $new --pattern ""
    refused '--arch-until: expected more than --arch-from 5, got 5' \
        $t $tiny $new --pattern search --arch-from 5 --arch-until 5
    refused '--pos-mode: expected dist unless --sines reference, got fixed' \
        $t $tiny $new --pos-mode fixed
    refused '--proj-dims: expected .*, got 99999999999' \
        $t $tiny $new --words-out reference --cutoffs 5,12 --proj-dims 5,99999999999
    refused '--latency fbnet: .* time above 1' \
        $t $tiny $new --pattern search --latency fbnet --latency-table 0.1,0.1
    refused '--tau-end: .*1e-300' $t $tiny $new --pattern search --tau-end 1e-300
    refused '--eval-mem 1000000000: .*--max-memory' $t $tiny $new --eval-mem 1000000000
    refused '--nheads.*--hid-sz' $t $tiny $new --nheads 3
    # options without effect
    for more in "proj-factor 2" "div-val 2" divide-all "momentum 0.9" "lr-min 0.1" \
        "arch-weight-decay 1 --arch-optim same" "latency-of w --latency none" \
        "init-std 1 --init reference" "latency-pass forward" "lr-start 1 --schedule reference"; do
        refused "--${more%% *} has no effect: it applies only to" \
            $t $tiny $new --pattern search --$more
    done
    refused '--one-proj has no effect: it applies only to --adaptive-in' $t $tiny $new --one-proj
    refused '--no-final-norm has no effect: .*--norm-before' $t $tiny $new --no-final-norm
    refused '--one-proj: expected off unless --adaptive-in .* 1 and --emb-sz differs from --hid-sz' \
        $t $tiny $new \
        --words-out adaptive --adaptive-in --cutoffs 5,12 --div-val 2 --one-proj
    refused '--inherit has no effect' \
        --checkpoint ../search/found.st --no-train --generate 1 --inherit good.st
    refused '--arch-every has no effect' \
        $t $tiny $new --pattern search --arch-share 0 --arch-every 2
    for split in batch-split update-every; do
        padded="$t $tiny --pattern sf --pad-id 0 --$split 2"
        refused "--pad-id with --$split: .*--divide-all, or --$split 1" $padded $new
        good "--$split with --divide-all" . $padded --divide-all --steps 2
    done
    # old: 3 steps with --pad-id 3 --update-every 2, which was allowed
    cp "$here/old/par_padding.safetensors" padding.st
    refused '--pad-id with --update-every: .* start a new run with --init-from padding.st and --update-every 1$' \
        $t --checkpoint padding.st --steps 6
    good "which starts one" . $t --init-from padding.st --update-every 1 --steps 2 --batch-sz 2 \
        --eval-batch-sz 1 --threads 1
    good "an evaluation of it" . $t --checkpoint padding.st --eval-only --eval-batch-sz 1 \
        --threads 1
    for pattern in sfx "(sf" "sf)" s0 "(sf)5000" 5; do
        refused "--pattern .*: expected letters" $t $tiny $new --pattern "$pattern"
    done
    for p in 0 1 3 x ""; do
        refused '--pattern par:.*expected par:' $t $tiny $new --pattern par:$p
    done
    refused '--adaptive-in.*--words-out adaptive' $t $tiny $new --adaptive-in
    refused '--cutoffs 5,x: expected' $t $tiny $new --words-out adaptive --cutoffs 5,x
    refused 'cutoff' $t $tiny $new --words-out adaptive --cutoffs 12,5
    refused 'cutoff' $t $tiny $new --words-out reference --cutoffs 12,300
    refused '--proj-dims 4: expected 2' \
        $t $tiny $new --words-out reference --cutoffs 5,12 --proj-dims 4
    refused '--latency-table 1: expected two' $t $tiny $new --latency-table 1
    refused '--latency-table 1,-1: expected two' $t $tiny $new --latency-table 1,-1
    refused '--latency hinge requires' $t $tiny $new --latency-target 0
    refused '--noise tokens requires --noise-tokens' $t $tiny $new --noise tokens
    refused '--update-every.*fixed' $t $tiny $new --update-every 2
    refused '--arch-share.*--streams' $t $tiny $new --arch-share 0.2 --streams 8
    refused '--arch-share.*--random-segments' $t $tiny $new --arch-share 0.2 --random-segments 4
    refused '--arch-share 0.01: .*too short' $t $tiny $new --arch-share 0.01
    refused '--inherit is only for a fixed' $t $tiny $new --inherit good.st
    refused '--inherit.*no such file' $t $tiny $new --pattern sf --inherit nothing.st
    refused '--inherit.*vocabulary' $t $tiny $new --pattern sf --inherit chars.st
    refused '--inherit' $t $tiny $new --pattern sf --inherit good.st --hid-sz 32
    for more in "nheads 1" norm-before "norm-eps 0.01" "emb-scale 2" "sines reference" full-scale \
        attn-relu; do
        refused "--inherit good.st: its weights were trained with --${more%% *} " \
            $t $tiny $new --pattern sf --inherit good.st --$more
    done
    refused '--picture.*--log' $t $tiny --steps 3 --picture x.svg
    refused '--race.*expected letters' $t $tiny $new --race sgf
    refused '--race: expected a fixed pattern' $t $tiny $new --race search
    refused '--eps-hat' $t $tiny $new --eps-hat --optim sgd
    refused '--pos-mode\|pos_mode' $t $tiny $new --pos-mode reference
    refused 'best.*eval-every' $t $tiny $new --best B.st --eval-every 0
    refused '--pieces' $t $tiny $new --tokens ids
    refused 't.txt has the same piece twice' $t $tiny $new --tokens ids --pieces t.txt
    printf 'a\nb\n' >list.vocab
    refused 'expected piece ids from 0 to' $t $tiny $new --tokens ids --pieces list.vocab
    refused 'SentencePiece' $t $tiny $new --tokens spm --pieces list.vocab
    refused 'max-memory' $t $tiny $new --hid-sz 268435456 --head-sz 8
}
family_evaluation() {
    # a search, and a fixed network with an attention
    for more in "eval/often.st " "eval/often.st --gate-eval soft" \
        "eval/often.st --gate-eval noise" "log/run.st " "log/run.st --eval-mem 0" \
        "log/run.st --eval-mem 40" \
            "log/run.st --eval-clamp-len 3" "log/run.st --eval-same-length"; do
        good "evaluation with $more" eval --data ../t.txt --eval-only \
            --log "other$(echo "$more" | tr -d ' /').jsonl" --threads 1 --checkpoint ../$more
    done
    check "other evaluations have other losses" \
        [ "$(head -q -n 1 eval/other*.jsonl | field loss | sort -u | wc -l)" -eq 8 ]
    check "other evaluations have as many tokens" \
        [ "$(head -q -n 1 eval/other*.jsonl | field tokens | sort -u | wc -l)" -eq 1 ]
    cd eval
    refused '--derive is only for a search' --data ../t.txt --derive --checkpoint ../log/run.st
    cd ..
    mkdir -p pads
    good "--race with padding and adaptive words" pads --data ../t.txt $tiny \
        --pattern search --steps 2 --latency fbnet --latency-power 0.5 --latency-table "" \
        --pad-id 32 --words-out reference --cutoffs 5,12 --proj-dims 8,4 --race xl
    check "--race with padding: a result" grep -q "^race, " "$T/out"
    good "a model without context, with padding" pads --data ../t.txt $tiny --pattern f \
        --steps 3 --pad-id 32 --no-divide-all --checkpoint p.st
    for n in 4 16 64; do
        good "evaluation in blocks of $n" pads --checkpoint p.st --eval-only --eval-batch-sz 1 \
            --eval-block-sz $n --log p$n.jsonl --threads 1
    done
    check "the loss does not depend on the block size" \
        awk -v v="$(head -q -n 1 pads/p4.jsonl pads/p16.jsonl pads/p64.jsonl | field loss |
        tr '\n' ' ')" 'BEGIN {
        n = split(v, a, " "); for (i = 2; i <= n; i++) if (!((a[i] - a[1]) ^ 2 < 1e-10)) exit 1
        exit n != 3 }'
    for all in divide-all no-divide-all; do
        good "a learning rate of 0, --$all" pads --data ../t.txt $tiny --pattern f --steps 1 \
            --lr 0 --pad-id 32 --$all --log $all.jsonl
    done
    check "the loss of evaluation does not depend on --divide-all" \
        awk -v a="$(events pads/divide-all.jsonl eval | field loss)" \
        -v b="$(events pads/no-divide-all.jsonl eval | field loss)" \
        'BEGIN { exit !(a > 1 && (a - b) ^ 2 < 1e-12) }'
    # Padding (_) has no loss, no bytes and no words. The values of each text use the counts
    # of that text.
    mkdir pads/uneven
    sed 's/cat/____cat/; s/$/_/' t.txt >pads/uneven/train.txt
    head -n 20 t.txt >pads/uneven/valid.txt
    sed 's/the /the__/' t.txt >pads/uneven/test.txt
    counted() { tr -d _ <"pads/uneven/$1.txt" | wc -c; }
    counted_words() { tr _ ' ' <"pads/uneven/$1.txt" | wc -w; }
    # UNIT MEAN: of a file with lines "train STEP LOSS VALUE" and "eval SPLIT LOSS VALUE"
    own_figures() {
        awk -v unit="$1" -v mean="$2" -v bytes="$(wc -c <pads/uneven/train.txt)" \
            -v t="$(counted train)" -v v="$(counted valid)" -v e="$(counted test)" \
            -v tw="$(counted_words train)" -v vw="$(counted_words valid)" \
            -v ew="$(counted_words test)" '
            {
                n = $1 == "train" ? t : $2 == "valid" ? v : e
                words = $1 == "train" ? tw : $2 == "valid" ? vw : ew
                nats = $1 == "train" && mean == "divide-all" ? $3 * bytes / t : $3
                want = unit == "bpc" ? nats / log(2) : exp(unit == "ppl" ? nats : nats * n / words)
                if (!((want / $4 - 1) ^ 2 < 1e-16)) bad = 1
                rows[$1 == "train" ? $1 : $2]++
            }
            END {
                exit bad || rows["train"] != 6 || rows["valid"] < 3 || rows["test"] != 1
            }' figures
    }
    for all in divide-all no-divide-all; do
        for unit in bpc word-ppl ppl; do
            run="--checkpoint $unit.$all.st --log $unit.$all.jsonl"
            good "padding, --data-unit $unit, --$all" pads --data uneven $tiny --pattern f \
                --pad-id 95 --$all \
                --data-unit $unit --steps 12 --eval-every 4 --log-every 2 $run
            good "evaluation of its checkpoint" pads $run --eval-only --threads 1
            tr -d '"{}' <pads/$unit.$all.jsonl | tr : ' ' |
                awk -F'[ ,]' '$2 == "train" || $2 == "eval" {
                print $2, $4, $6, $8 }' >figures
            check "$unit with --$all uses the tokens of each text: $(tr '\n' ';' <figures)" \
                own_figures $unit $all
        done
    done
    printf '_ab_\n__\nab\n' >pads/text
    good "a scored text with padding" pads --checkpoint bpc.divide-all.st --threads 1 --score text \
        --score-by lines
    rows=$(tail -n +2 out | cut -f 1-3 | tr '\t\n' ' ;')
    check "padding counts neither as tokens nor as bytes: $rows" [ "$rows" = "1 3 3;2 1 1;3 3 3;" ]
    cd pads
    printf '%99s' '' | tr ' ' _ >all
    refused '--pad-id 95: a text consists only of this token' \
        --data all $tiny --pattern f --pad-id 95
    cd ..
    good "a search with noise in evaluation" pads --data ../t.txt $tiny --pattern search \
        --gate-eval noise --tau-start 5 --tau-end 0.01 --tau-steps 40 --steps 40 --lr 0.01 \
        --checkpoint n.st --log n.jsonl
    check "noise in evaluation: the message has the other gates' losses" \
        grep -q '^valid with --gate-eval argmax: bpb [0-9.]*, and soft: bpb [0-9.]*$' "$T/out"
    good "evaluation of its checkpoint" pads --checkpoint n.st --eval-only --log m.jsonl --threads 1
    check "noise in evaluation: the same loss at the same temperature" \
        [ "$(events pads/n.jsonl eval | field loss)" \
        = "$(events pads/m.jsonl eval | head -n 1 | field loss)" ]
    good "evaluation at another temperature" pads --checkpoint n.st --eval-only --log o.jsonl \
        --threads 1 --tau-end 3
    check "noise in evaluation: another loss at another temperature" \
        [ "$(events pads/o.jsonl eval | head -n 1 | field loss)" != "$(events pads/m.jsonl eval |
        head -n 1 | field loss)" ]
    for cut in "--cutoffs 5,12" "--cutoffs 5 --cutoffs 12"; do
        good "$cut" pads --data ../t.txt $tiny --pattern f --words-out reference $cut --dry-run
        parameters
    done >both
    check "both options give the same clusters" \
        [ "$(sort -u both | wc -l)" -eq 1 -a "$(wc -l <both)" -eq 2 ]
    cd pads
    refused 'picture none/x.svg' \
        --data ../t.txt $tiny --pattern search --steps 2 --log s.jsonl --picture none/x.svg
    for same in "--picture n.st" "--picture n.jsonl" "--picture ../t.txt"; do
        refused "are the same file" \
            --data ../t.txt $tiny --pattern search --steps 2 --log n.jsonl --checkpoint n.st $same
    done
    refused '--eval-mem: expected 2 or more with --.*same-length.*got 1' \
        --checkpoint n.st --eval-only --eval-mem 1 --eval-same-length
    cd ..
    good "evaluation in longer blocks" eval --checkpoint often.st --eval-only \
        --eval-block-sz 40 --threads 1
    good "generation with another memory" eval --checkpoint often.st --no-train --generate 40 \
        --eval-mem 3 --eval-same-length --threads 1
    check "a fixed network has no curves of gates" \
        [ "$(grep -c 'search/' log/deep/tb/* | grep -vc ':0')" -eq 0 ]
}
family_small_presets() {
    for preset in reference par-search; do
        good "$preset, with the smallest sizes" log --preset $preset $sizes --tokens words \
            --cutoffs 5,12 --data ../w.txt --steps 4 --arch-from 1
    done
    for preset in wt103-large nvidia-base; do
        good "$preset, with the smallest sizes" log --preset $preset $sizes --cutoffs 5,12 \
            --emb-sz 0 --head-sz 0 --data ../w.txt --steps 3
    done
    good "enwik8, with the smallest sizes" log --preset enwik8 $sizes --head-sz 0 --data ../t.txt \
        --steps 3
}
# options without effect on the smallest model
useless() {
    cat <<'END2'
--cutoffs 5,12
--tie-projs all
--emb-sz 8
--proj-dims 4
--sample-prime 5
--sample-length 5
END2
}

# the clusters and tied tables of a vocabulary that grows: 3 tensors are the embedding, and
# the weight and the bias of the output
family_grows() {
    grows "grown, tied" w.txt n.txt 7 2 --tokens words --tied
    search=$tune_more tune_more=
    grows "grown tail" w.txt n.txt 7 2 --tokens words $words_more
    tune_more=$search
}
