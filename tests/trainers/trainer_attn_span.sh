# trainer_attn_span.sh - the parts of trainer.sh for train_attn_span: options,
# presets, and checks of this family only.

sizes="--nlayers 2 --hid-sz 16 --inner-hid-sz 32 --nheads 2 --attn-span 32 --block-sz 16"
sizes="$sizes --batch-sz 4 --threads 1"
# training with everything that draws random numbers or has a state; its learning rate does
# not depend on --steps
trained="--batch-split 2 --adapt-span --adapt-span-loss 0.0001 --adapt-span-init 0.5"
trained="$trained --adapt-span-ramp 8 --dropout 0.2 --emb-dropout 0.1 --optim adagrad --lr 0.07"
trained="$trained --grad-clip 0.3 --lr-warmup 20"
adapts=yes
steps_matter=no
long_more="--eval-every 50 --sample-every 60 --sample-prime 8 --sample-length 4"
no_cadence="--nbatches 100000"
no_evaluation="--eval-every 100000"
state_names='"memory\.[01]\.[a-z.0-9]*"' states=2
kills_at_times=20 kills_at_calls=20 spoiled_bytes=40
learning="--adapt-span --optim adam --lr 0.005 --dropout 0 --grad-clip 1"
whole_evaluations="--eval-blocks 1000000"
wild_more=
words_more=
train_keys=event,step,loss,bpb,lr,grad_norm,tokens_per_s,seconds,peak_bytes,span_avg,span_max,spans
learned='^learned span of each head\|^  layer '
another_preset=enwik8_small
sizes_above_0="nlayers hid-sz inner-hid-sz nheads attn-span block-sz batch-sz batch-split niter"
sizes_above_0="$sizes_above_0 nbatches"
too_much="--block-sz 512 --max-memory 0.006"
too_much_eval="--eval-batch-sz 150 --max-memory 0.0015"
token_by_token=
tune_more=
local_options="checkpoint init-from grow-vocab export"
local_options="$local_options score score-by best log tensorboard full-eval-mode eval-only"
local_options="$local_options no-train threads device gpu tune no-graph max-memory dry-run vocab"
local_options="$local_options list-presets version generate prompt temperature top-k top-p"
local_options="$local_options repetition-penalty repetition-window stop interactive keep-best out"
local_options="$local_options weights shard"
# old: tiny models after 30 steps of --preset demo, by the first version; _bare:
# without the options that old_given has
old_options='"lr":0.003,"schedule":"cosine","lr-warmup":60,.*"grad-clip":1,' old_loss=2.8432
old_given="--preset demo --nlayers 1 --hid-sz 4 --inner-hid-sz 4 --nheads 2 --attn-span 8"
old_given="$old_given --block-sz 8 --batch-sz 2 --tokens bytes-compact --steps 60"
# for tests/trainers/trainer_cuda.sh
cuda_model="--nlayers 2 --hid-sz 32 --nheads 2 --inner-hid-sz 48 --attn-span 48 --lr 0.02"
cuda_more="--adapt-span --adapt-span-init 0.3 --adapt-span-ramp 8"      # not for cuda_note
# a memory that grows in every step
cuda_note="--nlayers 1 --attn-span 512 --block-sz 4 --batch-sz 1 --steps 70"

# name, million parameters, parameters, layers, d
presets() {
    cat <<END2
demo 0.7 667276 3 128
reference 6.4 6445312 8 256
enwik8_small 6.5 6480621 8 256
enwik8 38.5 38538541 12 512
enwik8_fairseq 38.5 38538541 12 512
enwik8_large 208.9 208910221 24 768
text8 38.4 38357116 12 512
text8_large 208.6 208638172 24 768
enwik8_pers_small 38.5 38501725 18 512
enwik8_pers 114.0 114017773 36 512
wiki103_pers 132.5 132493746 36 512
END2
}
family_presets() {
    good "the shape of a preset" . --preset enwik8_small --dry-run
    check "the message has the shape" grep -q '^8 layers, 4 heads, span 1024$' out
}
family_variants() {
    variant "adagrad" --data ../t.txt $full
    for optim in sgd adam adamw muon; do
        variant $optim --data ../t.txt $full --optim $optim --lr 0.003 --weight-decay 0.01
    done
    variant "fixed span" --data ../t.txt $tiny --optim adam --lr 0.003 --no-adapt-span
    variant "whole cache" --data ../t.txt $full --no-adapt-span-cache
    variant "persistent vectors" --data ../t.txt $full --pers-mem-size 8
    variant "literal" --data ../t.txt $full --literal
    mkdir forms
    # eps does not apply to a model with --no-renorm
    while read -r but name more; do
        good "all forms but $but $more" forms --data ../t.txt $full $more --steps 12 --literal \
            --no-literal-$but --checkpoint but.st
        good "its name, $name" forms --data ../t.txt $full $more --steps 12 --literal $name \
            --checkpoint name.st
        check "is the same training" same_state forms/but.st forms/name.st
        rm -f forms/*.st
    done <<'END2'
eps memory
memory eps
eps memory --no-renorm
memory off --no-renorm
END2
    variant "fairseq's form" --data ../t.txt $full --no-renorm --fairseq-init --literal memory
    variant "one span per layer" --data ../t.txt $full --span-per-layer
    variant "adaptive words, tied" --data ../w.txt $full $adaptive --adapt-io-tied
    variant "inverse square root" --data ../t.txt $full --schedule inv-sqrt --batch-split 4
}
family_more() {
    # --niter takes precedence over --steps of the checkpoint
    mkdir niter
    good "12 steps" niter --data ../t.txt --checkpoint run.st $full --steps 12
    good "then 5 iterations of 4" niter --checkpoint run.st --niter 5 --nbatches 4 --threads 1
    check "12 steps, then 5 iterations of 4: 20 steps" [ "$(meta niter/run.st step)" = 20 ]
    # but not --niter of a preset
    preset="--preset reference $full --tokens bytes"
    good "a preset, 3 steps" niter --data ../t.txt --checkpoint preset.st $preset --steps 3
    good "the preset again" niter --checkpoint preset.st $preset
    check "a preset's --niter: still 3 steps" [ "$(meta niter/preset.st step)" = 3 ]
    # spans of all heads: the same in the log, in the curves and at the end
    spans() { events "$1" | tail -n 1 | sed 's/.*"spans":.\([^]]*\).*/\1/'; }
    good "spans of all heads" niter --data ../t.txt $full --nlayers 3 --nheads 2 --steps 20 \
        --log-every 1 --log spans.jsonl --tensorboard tb
    check "the log has a span for each head, as printed at the end" \
        [ "$(spans niter/spans.jsonl | tr ',' '\n' | awk '{ printf " %.0f", $1 }')" \
        = "$(sed -n 's/^  layer *[0-9]* *//p' out | tr -s ' \n' ' ' | sed 's/^/ /; s/ $//')" ]
    check "spans change" \
        [ "$(spans niter/spans.jsonl)" != "$(events niter/spans.jsonl | head -n 1 |
        sed 's/.*"spans":.\([^]]*\).*/\1/')" ]
    for head in 1_head_1 1_head_2 3_head_2; do
        check "a curve of head $head" [ "$(grep -ao "span/layer_$head" niter/tb/* | wc -l)" -eq 20 ]
    done
    check "six curves of spans" \
        [ "$(grep -ao 'span/layer_[0-9]*_head_[0-9]*' niter/tb/* | sort -u | wc -l)" -eq 6 ]
    good "one span per layer" niter --data ../t.txt $full --nlayers 3 --nheads 2 --span-per-layer \
        --steps 2 --log-every 1 --log layers.jsonl
    check "one span per layer: three values in the log" \
        [ "$(spans niter/layers.jsonl | tr ',' '\n' | wc -l)" -eq 3 ]
    good "no learned spans" niter --data ../t.txt $tiny --no-adapt-span --steps 2 --log-every 1 \
        --log none.jsonl
    check "no learned spans: an empty list in the log" grep -q '"spans":\[\]' niter/none.jsonl
}
# options that a checkpoint decides
fixed_options() {
    cat <<END2
--precision bf16
--nlayers 3
--hid-sz 32
--inner-hid-sz 64
--nheads 4
--attn-span 64
--tokens chars
--min-count 3
--optim adam
--momentum 0.5
--batch-sz 8
--batch-split 1
--block-sz 32
--pers-mem-size 4
--no-adapt-span
--adapt-span-ramp 9
--adapt-span-init 0.25
--no-adapt-span-cache
--no-renorm
--span-per-layer
--fairseq-init
--adapt-io
--adapt-io-cutoffs 3,4
--literal
--literal memory
END2
}
# sed scripts that keep the length of a checkpoint's header
spoils() {
    cat <<'END2'
s/^{/[/
s/"__metadata__"/"__metadatb__"/
s/attn_span\.1"/attn_span.9"/
s/"F32"/"F33"/
s/"F32"/"F16"/
s/"shape":\[32,/"shape":[33,/
s/"data_offsets":\[0,/"data_offsets":[4,/
s/"step":"6"/"step":"x"/
s/"data.position":"/"data.positiom":"/
s/"tick":"/"tick":"-/; s/"tick":"-\(.*\)[0-9]"/"tick":"-\1"/
s/"optim.kind":"[0-9]"/"optim.kind":"7"/
s/"in_emb/"in_enb/
s/"config":"{/"config":"[/
s/\\"nlayers\\":2/\\"nlayers\\":0/
s/\\"nlayers\\":2/\\"nlayers\\":3/
s/\\"hid-sz\\":16/\\"hid-sz\\":24/
s/\\"nheads\\":2/\\"nheads\\":3/
s/\\"nheads\\":2/\\"nheads\\":x/
s/\\"tokens\\":\\"bytes\\"/\\"tokens\\":\\"bytez\\"/
s/\\"batch-sz\\":4/\\"batch-sz\\":8/
s/\\"block-sz\\":16/\\"block-sz\\":00/
s/"memory.0.rows.0":"[0-9]/"memory.0.rows.0":"9/
s/"vocab":{"dtype":"U8"/"vocab":{"dtype":"U9"/
s/"vocab"/"vocaa"/
s/.$/]/
END2
}
family_bad() {
    refused 'nheads' $t $tiny $new --nheads 3
    refused 'adapt-span' $t $tiny $new --adapt-span=maybe
    refused 'no-renorm requires --adapt-span' $t $tiny $new --no-renorm
    refused 'span-per-layer requires --adapt-span' $t $tiny $new --span-per-layer
    refused '--literal eps requires --adapt-span without --no-renorm; --literal without names selects' \
        $t $tiny $new --no-renorm --adapt-span --literal eps
    refused '--literal eps requires --adapt-span' $t $tiny $new --no-adapt-span --literal eps,memory
    refused '--lr-min: expected at most --lr 0.01, got 0.1' \
        $t $tiny $new --schedule cosine --lr 0.01 --lr-min 0.1
    refused "--literal: expected on, off, or any of eps, memory, got 'rows'" \
        $t $tiny $new --literal rows
    refused 'C.st' $t --full-eval-mode --checkpoint C.st $old
    refused 'max-memory' $t $tiny $new --hid-sz 536870912 --inner-hid-sz 1073741824
    refused 'max-memory' $t $tiny $new --attn-span 1073741824 --hid-sz 536870912
    refused 'max-memory' $t $tiny $new --pers-mem-size 1073741824 --nlayers 4096 --nheads 16
    refused 'max-memory' $t $tiny $new --nlayers 4096 --hid-sz 536870912 --nheads 256
    refused 'max-memory' $t $tiny $new --attn-span 65536 --max-memory 0.005
}
family_evaluation() {
    good "--full-eval-mode, as in the reference" eval --data ../t.txt --checkpoint often.st \
        --full-eval-mode --log ref.jsonl --threads 1
    check "--full-eval-mode: keys of the log" \
        only_keys eval/ref.jsonl eval event,split,loss,bpb,step,tokens
    check "--full-eval-mode: fewer tokens" \
        [ "$(head -n 1 eval/ref.jsonl | field tokens)" \
        -lt "$(head -n 1 eval/only1.jsonl | field tokens)" ]
}
lost_output() { # WHAT COMMAND..: with standard output on a full disk, it fails and says so
    what=$1; shift
    echo "the cat" | "$@" >/dev/full 2>err; rc=$?
    check "$what: lost output: exit code 1, got $rc: $(cat err)" \
        [ $rc -eq 1 -a "$(grep -c "^$what: .* cannot be written" err)" -eq 1 ]
}
family_small_presets() {
    built=${bin%/*}
    if [ -w /dev/full ] && [ -x "$built/hello" ] && [ -x "$built/remember" ]; then
        lost_output hello "$built/hello" t.txt
        lost_output remember "$built/remember" mind.st memory.st t.txt 3
        check "a line without an answer is not remembered" [ ! -e memory.st ]
    else
        echo "left out: lost output of hello and remember (not built, or no /dev/full)"
    fi
    good "a preset with the smallest sizes" log --preset enwik8_small $sizes --data ../t.txt \
        --steps 4
}
# options without effect on the smallest model
useless() {
    cat <<'END2'
--adapt-span-loss 0.1
--adapt-span-ramp 9
--adapt-span-init 0.5
--adapt-span-cache
--adapt-io-tied
--adapt-io-divval 3
--adapt-io-cutoffs 3,4
--momentum 0.5 --optim adam
--lr-min 0.1
--niter 5
END2
}

# the clusters and tied tables of a vocabulary that grows: 3 tensors are the embedding, and
# the weight and the bias of the output
family_grows() {
    grows "grown tail" w.txt n.txt 7 3 $adaptive
    grows "grown tail, tied" w.txt n.txt 7 2 $adaptive --adapt-io-tied
}
