# trainer_sru.sh - the parts of trainer.sh for train_sru: options, presets, and
# checks of this family only.

sizes="--nlayers 2 --hid-sz 16 --proj-sz 8 --nheads 1 --block-sz 16 --batch-sz 4 --threads 1"
trained="--nheads 2 --dropout 0.2 --attn-dropout 0.1 --lr 0.01 --lr-warmup 20 --weight-decay 0.01"
trained="$trained --schedule constant"
adapts=yes
steps_matter=yes       # the schedule of the killed runs depends on --steps
long_more="--schedule recursive --eval-every 25 --batch-split 2 --sample-every 60 --sample-prime 8"
long_more="$long_more --sample-length 4"
no_cadence=
no_evaluation=
state_names='"state\.[01]\.[a-z.0-9]*"' states=6
kills_at_times=8 kills_at_calls=10 spoiled_bytes=20
learning="--hid-sz 32 --proj-sz 16 --dropout 0 --attn-dropout 0 --lr 0.03 --lr-warmup 10"
whole_evaluations=
wild_more="--schedule constant --weight-decay 0 --lr-warmup 0"
words_more="--adapt-io --adapt-io-divval 2 --adapt-io-cutoffs 5,12"
train_keys=event,step,loss,bpb,lr,grad_norm,tokens_per_s,seconds,peak_bytes,skipped
learned='^learned weight of attention: .*(layer 1), .*(layer 2)$'
another_preset=enwik8-base
sizes_above_0="nlayers hid-sz nheads block-sz batch-sz batch-split update-param-freq"
too_much="--block-sz 512 --max-memory 0.006"
too_much_eval="--eval-batch-sz 150 --max-memory 0.0015"
token_by_token=
tune_more=
local_options="checkpoint init-from grow-vocab export"
local_options="$local_options score score-by best log tensorboard eval-only no-train threads"
local_options="$local_options device gpu tune no-graph max-memory dry-run vocab list-presets"
local_options="$local_options version generate prompt temperature top-k top-p repetition-penalty"
local_options="$local_options repetition-window stop interactive keep-best out weights shard"
# old: tiny models after 30 steps of --preset demo, by the first version; _bare:
# without the options that old_given has
old_options='"lr":0.02,"schedule":"recursive","lr-warmup":60,.*"grad-clip":1,' old_loss=2.9302
old_given="--preset demo --nlayers 1 --hid-sz 4 --proj-sz 2 --nheads 1 --block-sz 8 --batch-sz 2"
old_given="$old_given --tokens bytes-compact --attention-last 0 --steps 60"
recurrent="--cell sru --dropout 0.2 --rnn-dropout 0.1 --lr 0.01 --schedule constant --lr-warmup 20"
# for tests/trainers/trainer_cuda.sh
cuda_model="--nlayers 2 --hid-sz 32 --proj-sz 16 --nheads 2 --dropout 0.1 --attn-dropout 0.1"
cuda_model="$cuda_model --lr 0.01 --schedule constant"
cuda_note=

# name, million parameters, parameters, layers, d
presets() {
    cat <<END2
demo 0.8 830466 4 384
reference 1.5 1451268 4 512
enwik8-base 107.6 107566295 10 3072
enwik8-large 190.6 190607575 10 4096
enwik8-large-8to1 195.0 194993815 10 6016
enwik8-fp32 42.3 42345815 10 1920
wt103-base 147.7 147676036 10 3072
wt103-large 231.7 231690116 10 4096
wt103-large-8to1 233.7 233741476 10 5952
wt103-large-k5 224.9 224884892 10 5952
lm1b-base 328.3 328313803 10 4096
lm1b-large-k5 465.3 465318339 10 7616
enwik8-sru 16.8 16845046 6 1024
enwik8-sru-8x1312 37.6 37577238 8 1312
enwik8-sru-10x1152 37.1 37100918 10 1152
enwik8-sru-8x3056 47.7 47717117 8 3056
enwik8-sru-12x2048 48.8 48805325 12 2048
ptb 24.0 24026720 6 910
END2
}
family_presets() {
    good "attention in layers 5 and 10" . --preset wt103-large-k5 --dry-run
    check "the message has the shape" grep -q '^10 layers, 2 with attention' out
    good "no preset, attention in every second layer" . --attention-every 2 --dry-run
    check "the default --attention-last gives way" grep -q '^4 layers, 2 with attention' out
}
family_variants() {
    good "an option of the attention" . --data t.txt --threads 1 --log attends.jsonl --steps 2 \
        --nheads 2
    check "selects attention" grep -q '"event":"start".*"attention":true' attends.jsonl
    good "no option of the attention" . --data t.txt --threads 1 --log recurs.jsonl --steps 2
    check "a short run has no attention" grep -q '"event":"start".*"attention":false' recurs.jsonl
    rm -f attends.jsonl recurs.jsonl
    variant "sru++" --data ../t.txt $full
    for optim in sgd adam adamw muon; do
        variant $optim --data ../t.txt $full --optim $optim --lr 0.003
    done
    variant "adagrad" --data ../t.txt $full --optim adagrad --lr 0.07 --weight-decay 0
    variant "radam that skips" --data ../t.txt $full --radam-skip
    variant "attention in every second layer" --data ../t.txt $full --nlayers 4 --attention-every 2
    variant "attention in the last layer" --data ../t.txt $full --attention-last 1 \
        --attn-norm-first --alpha-init 0.5
    variant "no attention" --data ../t.txt $full --no-attention --attn-dropout 0 --no-attn-norm
    variant "norm before" --data ../t.txt $full --norm before
    variant "norm before, literal" --data ../t.txt $full --norm before --literal
    mkdir forms
    good "all forms but norm" forms --data ../t.txt $full --norm before --steps 12 --literal \
        --no-literal-norm --checkpoint but.st
    good "no form" forms --data ../t.txt $full --norm before --steps 12 --checkpoint none.st
    check "is the same training" same_state forms/but.st forms/none.st
    good "and reads token by token" forms --checkpoint but.st --score ../t.txt --score-by lines \
        --threads 1
    variant "norm after, rescale, tanh" --data ../t.txt $full --norm after --rescale --tanh \
        --highway-bias -1
    variant "no highway" --data ../t.txt $full --no-skip
    variant "another width of the embedding" --data ../t.txt $full --emb-sz 12
    variant "another width of the embedding, with an input layer" --data ../t.txt $full \
        --emb-sz 12 --input-first
    variant "sru" --data ../t.txt $tiny $recurrent
    variant "sru, projected, xavier" --data ../t.txt $tiny $recurrent --proj-sz 4 --init-xavier \
        --v-init 0.5
    variant "sru v1, tied" --data ../t.txt $tiny $recurrent --v1 --tied --proj-sz 0 --sum-loss \
        --optim sgd --lr 0.1 --grad-clip 5 --lr-decay 0.9 --lr-decay-from 20 --lr-decay-every 5
    variant "noam" --data ../t.txt $tiny $recurrent --schedule noam --lr 0.1
    variant "adaptive words, dropout inside" --data ../w.txt $full $adaptive --emb-dropout 0.1
    variant "adaptive words, separate projections" --data ../w.txt $full $adaptive \
        --adapt-io-separate --emb-sz 12
    variant "two blocks per update, in two parts" --data ../t.txt $full --update-param-freq 2 \
        --batch-split 2
}
losses_agree() { # FILE FILE N TOLERANCE: N losses each that differ by at most TOLERANCE
    events "$1" | field loss >a; events "$2" | field loss >b
    [ "$(wc -l <a)" -eq "$3" ] && [ "$(wc -l <b)" -eq "$3" ] && paste a b |
        awk -v tol="$4" '{ e = $1 - $2; if (!(e <= tol && -e <= tol)) bad = 1 } END { exit bad }'
}
rates() { events "$1" | field lr | tr '\n' ' '; }
family_more() {
    mkdir split rates epoch
    smooth="$tiny --nheads 2 --dropout 0 --attn-dropout 0 --schedule constant --log-every 1"
    smooth="$smooth --data ../t.txt"
    good "a batch in one part" split $smooth --steps 40 --lr 0.01 --log one.jsonl
    good "a batch in four parts" split $smooth --steps 40 --lr 0.01 --log four.jsonl --batch-split 4
    check "parts change only the rounding" losses_agree split/one.jsonl split/four.jsonl 40 1e-4
    # learning rate 0: the mean losses of pairs of blocks are those of updates of two blocks
    good "one block per update" split $smooth --steps 20 --lr 0 --weight-decay 0 --log freq1.jsonl
    good "two blocks per update" split $smooth --steps 10 --lr 0 --weight-decay 0 \
        --log freq2.jsonl --update-param-freq 2
    events split/freq1.jsonl | field loss |
        awk '
            { s += $1 }
            NR % 2 == 0 {
                printf "{\"event\":\"train\",\"loss\":%.17g}\n", s / 2
                s = 0
            }' >split/pairs.jsonl
    check "an update of two blocks keeps the state between them" \
        losses_agree split/pairs.jsonl split/freq2.jsonl 10 1e-5
    good "--sum-loss: the mean, for comparison" split $smooth --steps 10 --lr 0.01 --optim sgd \
        --grad-clip 0 --weight-decay 0 --log mean.jsonl
    good "--sum-loss with a learning rate divided by the tokens" split $smooth --steps 10 \
        --lr 0.000625 --optim sgd --grad-clip 0 --weight-decay 0 --sum-loss --log sum.jsonl
    check "--sum-loss: the same losses" losses_agree split/mean.jsonl split/sum.jsonl 10 1e-4

    good "--schedule recursive" rates $smooth --steps 8 --lr 1 --schedule recursive \
        --lr-warmup 4 --log r.jsonl
    check "--schedule recursive: up from a quarter, then down: $(rates rates/r.jsonl)" \
        [ "$(events rates/r.jsonl | field lr | awk '{ printf "%.4f ", $1 }')" \
        = "$(awk '
            BEGIN {
                for (n = 0; n < 8; n++) {
                    pi = atan2(0, -1)
                    printf "%.4f ", n < 4 ? (n + 1) / 4 \
                        : (1 + cos(pi * n / 8)) / (1 + cos(pi * 3 / 8))
                }
            }')" ]
    good "--lr-first-zero" rates $smooth --steps 4 --lr 1 --schedule recursive --lr-warmup 4 \
        --lr-first-zero --log z.jsonl
    check "--lr-first-zero: 0, a quarter, ..: $(rates rates/z.jsonl)" \
        [ "$(rates rates/z.jsonl)" = "0 0.25 0.5 0.75 " ]
    good "--schedule noam" rates $smooth --steps 8 --lr 2 --schedule noam --lr-warmup 4 \
        --log n.jsonl
    check "--schedule noam: up for four steps, then down: $(rates rates/n.jsonl)" \
        [ "$(events rates/n.jsonl | field lr | awk '{ printf "%.5f ", $1 }')" \
        = "$(awk '
            BEGIN {
                for (n = 1; n <= 8; n++) {
                    a = n ^ -0.5
                    b = n * 4 ^ -1.5
                    printf "%.5f ", 2 / 4 * (a < b ? a : b)
                }
            }')" ]
    good "--lr-decay" rates $smooth --steps 8 --lr 1 --lr-warmup 0 --lr-decay 0.5 \
        --lr-decay-from 4 --lr-decay-every 2 --log d.jsonl
    check "--lr-decay: halved from the fifth step, every second step: $(rates rates/d.jsonl)" \
        [ "$(rates rates/d.jsonl)" = "1 1 1 1 0.5 0.5 0.25 0.25 " ]

    # streams of 749 tokens: 46 blocks of 16, or 11 updates of four blocks; then the next
    # epoch begins at the start of the text
    good "46 blocks and one" epoch $smooth --steps 47 --checkpoint one.st
    check "an epoch begins at the start of the text" \
        [ "$(meta epoch/one.st data.wraps) $(meta epoch/one.st data.position)" = "1 16" ]
    good "11 updates of four blocks and one" epoch $smooth --steps 12 --update-param-freq 4 \
        --checkpoint four.st
    check "an epoch begins at the start, also if some blocks do not suffice for an update" \
        [ "$(meta epoch/four.st data.wraps) $(meta epoch/four.st data.position)" = "1 64" ]
}
# options that a checkpoint decides
fixed_options() {
    cat <<END2
--cell sru
--nlayers 3
--hid-sz 32
--proj-sz 4
--emb-sz 8
--nheads 4
--attention-every 2
--attention-last 1
--no-attention
--no-attn-norm
--norm after
--highway-bias -3
--no-skip
--tanh
--v1
--rescale
--tied
--adapt-io
--tokens chars
--min-count 3
--optim adam
--radam-skip
--momentum 0.5
--batch-sz 8
--batch-split 2
--block-sz 32
--update-param-freq 2
--sum-loss
--v-init 0.5
--alpha-init 0.5
--precision bf16
END2
}
# sed scripts that keep the length of a checkpoint's header
spoils() {
    cat <<'END2'
s/seqtx.sru\.1"/seqtx.sru.9"/
s/\\"nlayers\\":2/\\"nlayers\\":3/
s/\\"hid-sz\\":16/\\"hid-sz\\":24/
s/"state\.0\.c"/"state.1.c"/
s/"optim.kind":"[0-9]"/"optim.kind":"3"/
s/\\"cell\\":\\"sru++\\"/\\"cell\\":\\"sru+-\\"/
s/^{/[/
s/"F32"/"F33"/
s/"step":"6"/"step":"x"/
s/"config":"{/"config":"[/
s/\\"batch-sz\\":4/\\"batch-sz\\":8/
s/\\"block-sz\\":16/\\"block-sz\\":00/
s/"vocab"/"vocaa"/
s/.$/]/
END2
}
family_bad() {
    refused 'nheads: expected a divisor of --proj-sz 8, got 3' $t $tiny $new --nheads 3
    refused 'update-param-freq 1000: expected streams of at least [0-9]* tokens .*, got [0-9]*' \
        $t $tiny $new --update-param-freq 1000
    refused 'more parameters than can be counted' \
        --cell sru --proj-sz 0 --nlayers 4096 --hid-sz 268435456 --dry-run
    refused 'best.*eval-every' $t $tiny $new --best B.st
    refused 'streams and --update-param-freq cannot be combined' \
        $t $tiny $new --streams 8 --update-param-freq 2
    refused 'attention-every and --attention-last cannot be combined' \
        $t $tiny $new --attention-every 2 --attention-last 1
    refused 'tied.*adapt-io' $t $tiny $new --tied --adapt-io
    refused 'emb-sz: expected --hid-sz 16 with --tied, got 8' $t $tiny $new --tied --emb-sz 8
    refused 'noam.*lr-warmup' $t $tiny $new --schedule noam --lr-warmup 0
    refused '--literal norm requires --cell sru++ with --norm before; --literal without names selects' \
        $t $tiny $new --literal norm
    refused '--literal norm requires --cell sru++' \
        $t $tiny $new --cell sru --norm before --literal=norm
    refused "--literal: expected on, off, or any of norm, got 'rows'" $t $tiny $new --literal rows
    good "a model without literal forms" . $t $tiny --literal --steps 1 --checkpoint none.st
    good "a literal form that excludes token by token" . $t $tiny --literal --norm before \
        --steps 1 --checkpoint literal.st
    refused '--score-by and --literal norm cannot be combined' --checkpoint literal.st --score t.txt --score-by lines
    good "the literal form scores a file" . --checkpoint literal.st --score t.txt --threads 1
    refused 'cell' $t $tiny $new --cell lstm
    refused 'norm' $t $tiny $new --norm between
    refused 'max-memory' $t $tiny $new --hid-sz 268435456
    refused 'max-memory' --preset lm1b-large-k5 $t $new --tokens bytes --no-adapt-io --max-memory 1
}
family_evaluation() {
    good "evaluation with a window of 5" eval --data ../t.txt --checkpoint often.st --eval-only \
        --eval-unroll 5 --log short.jsonl --threads 1
    check "a window of 5 changes the loss" \
        [ "$(head -n 1 eval/short.jsonl | field loss)" != "$(head -n 1 eval/only1.jsonl |
        field loss)" ]
    check "a window of 5 evaluates at least as many tokens" \
        [ "$(head -n 1 eval/short.jsonl | field tokens)" \
        -ge "$(head -n 1 eval/only1.jsonl | field tokens)" ]
    good "training with another evaluation window, one stream" eval --data ../t.txt $full \
        --steps 20 --checkpoint own.st --eval-unroll 40 --eval-batch-sz 1 --log own.jsonl
    good "the checkpoint stores the evaluation window" eval --data ../t.txt --checkpoint own.st \
        --eval-only --eval-batch-sz 1 --log own2.jsonl --threads 1
    check "evaluation from the checkpoint: the same loss" \
        [ "$(events eval/own.jsonl eval | tail -n 1 | field loss)" \
        = "$(head -n 1 eval/own2.jsonl | field loss)" ]
    least=$(events log/best2.jsonl eval | field loss | sort -g | head -n 1)
    good "evaluation of the best" log --data ../t.txt --checkpoint best2.st --eval-only \
        --log best3.jsonl --threads 1
    check "the best has the lowest loss" [ "$(head -n 1 log/best3.jsonl | field loss)" = "$least" ]
    good "--cell sru" log --data ../t.txt $tiny $recurrent --steps 20 --generate 10 --prompt "the"
    check "--cell sru: no message about attention" [ "$(cat out err | grep -c 'attention')" -eq 0 ]
}
family_small_presets() {
    check "--help lists what is not reproduced" sh -c "tr '\\n' ' ' <help | grep -q 'Not reproduced'"
    for preset in enwik8-base enwik8-sru-8x3056; do
        good "$preset, with the smallest sizes" log --preset $preset $sizes --emb-sz 0 \
            --data ../t.txt --steps 4
    done
    for preset in wt103-base lm1b-base; do
        good "$preset, with the smallest sizes" log --preset $preset $sizes --emb-sz 8 \
            --adapt-io-divval 2 --adapt-io-cutoffs 5,12 --data ../w.txt --steps 4
    done
    good "ptb, with the smallest sizes" log --preset ptb $sizes --data ../w.txt --steps 4
}
# options without effect on the smallest model
useless() {
    cat <<'END2'
--init-xavier
--attention --cell sru
--attention-every 2 --cell sru
--attention-last 1 --cell sru
--attn-dropout 0.1 --cell sru
--attn-norm --cell sru
--attn-norm-first --no-attn-norm
--alpha-init 1 --no-attention
--highway-bias 1 --no-skip
--rescale --no-skip
--v-init 1 --v1
--input-first
--adapt-io-separate
--adapt-io-divval 3
--adapt-io-cutoffs 3,4
--emb-dropout 0.1
--radam-skip --optim adam
--momentum 0.5
--lr-first-zero --schedule cosine
--lr-min 0.1 --schedule constant
--lr-decay-from 5
--lr-decay-every 5
END2
}

# the clusters and tied tables of a vocabulary that grows: 3 tensors are the embedding, and
# the weight and the bias of the output
family_grows() {
    grows "grown tail" w.txt n.txt 7 2 $adaptive
    grows "grown, tied" w.txt n.txt 7 2 --tokens words --tied
}
