# trainer_compressive.sh - the parts of trainer.sh for train_compressive:
# options, presets, and checks of this family only.

sizes="--nlayers 2 --hid-sz 16 --inner-hid-sz 32 --nheads 2 --block-sz 16 --mem 16 --cmem 8"
sizes="$sizes --memory-layers all --gate residual --batch-sz 4 --batch-split 1 --random-segments 0"
sizes="$sizes --sample-every 0 --threads 1"
# most of its steps are between two updates; its learning rate does not depend on --steps
trained="--batch-split 2 --dropout 0.2 --aux-dropout 0.1 --lr 0.01 --lr-warmup 20 --lr-start 0.001"
trained="$trained --update-every 3 --update-after 20"
adapts=no
steps_matter=no
long_more="--eval-every 50 --sample-every 60 --sample-prime 8 --sample-length 4"
no_cadence="--save-every 0"
no_evaluation="--eval-every 0"
state_names='"memory\.[01]\.[a-z.0-9]*"' states=6
kills_at_times=5 kills_at_calls=6 spoiled_bytes=20
learning="--hid-sz 32 --inner-hid-sz 64 --positions xl --recurrence none --dropout 0 --lr 0.005"
learning="$learning --grad-clip 1"
whole_evaluations=
wild_more=
words_more=
train_keys=event,step,loss,bpb,lr,grad_norm,tokens_per_s,seconds,peak_bytes,aux,ratio
learned='^lost by compression, .*(layer 1), .*(layer 2)$'
another_preset=enwik8
sizes_above_0="nlayers hid-sz nheads block-sz ratio batch-sz batch-split update-every"
too_much="--block-sz 512 --max-memory 0.006"
too_much_eval="--eval-batch-sz 150 --max-memory 0.0015"
token_by_token=
tune_more=
local_options="checkpoint init-from grow-vocab export"
local_options="$local_options score score-by best log tensorboard eval-positions eval-only"
local_options="$local_options no-train threads device gpu tune no-graph max-memory dry-run vocab"
local_options="$local_options list-presets version generate prompt temperature top-k top-p"
local_options="$local_options repetition-penalty repetition-window stop interactive keep-best out"
local_options="$local_options weights shard"
# old: a tiny model after 30 steps of --preset demo, by the first version; no
# checkpoint of it lacks options
old_options='"lr":0.004,"schedule":"cosine","lr-warmup":60,.*"grad-clip":1,' old_loss=2.9168
old_given=
# for tests/trainers/trainer_cuda.sh
cuda_model="--nlayers 2 --hid-sz 16 --inner-hid-sz 16 --nheads 2 --mem 16 --cmem 4"
cuda_model="$cuda_model --memory-layers 2 --batch-split 1 --random-segments 0 --lr 0.01"
cuda_note=

# name, million parameters, parameters, layers, d
presets() {
    cat <<END2
demo 0.8 840704 3 128
reference 54.4 54421248 8 512
readme 102.0 102035104 12 512
enwik8 353.0 353036493 24 1024
wikitext103 595.5 595532247 18 1024
pg19 599.5 599510272 36 1024
END2
}
# The count of the reference, with a convolution in each layer: V E 2 + V, projections
# where E is not D, the table of positions, layers
reference_count() { # V E D L S M C R GLU
    echo "$@" | awk '{ V = $1; E = $2; D = $3; L = $4; r = $8; g = 1 + $9
        layer = 4 * D + 4 * D * D + D + (r * D * D + D) + 4 * D * D * (g + 1) + 4 * D * g + D
        layer += 2 * (6 * D * D + 6 * D)
        projections = E != D ? 2 * E * D + D + E : 0
        printf "%d", 2 * V * E + V + projections + D * ($5 + $6 + $7) + L * layer }'
}
parameters() { sed -n 's/^\([0-9]*\) parameters.*/\1/p' out; }
family_presets() {
    # The reference has unused convolutions in its five layers without memory, 4 d^2 + d
    # each.
    n=$(reference_count 256 512 512 8 512 512 128 4 0)
    check "the reference's example has 59,666,688 parameters as it counts them" \
        [ "$n" -eq 59666688 ]
    good "the reference's example" . --preset reference --dry-run
    check "the reference's example: without five unused convolutions" \
        [ "$(parameters)" -eq $((n - 5 * (4 * 512 * 512 + 512))) ]
    check "the reference's example: its shape" \
        grep -q '^8 layers, 8 heads, segment 512; 3 layers with a memory, 1920 rows in total$' \
        out
    n=$(reference_count 20000 128 512 12 1024 1024 256 4 1)
    good "the README's example" . --preset readme --dry-run
    check "the README's example: $n without five unused convolutions" \
        [ "$(parameters)" -eq $((n - 5 * (4 * 512 * 512 + 512))) ]
    good "the reference's example with a memory in every layer" . --preset reference \
        --memory-layers all --dry-run
    check "with a memory in every layer: as many parameters as the reference" \
        [ "$(parameters)" -eq 59666688 ]
    # The Transformer-XL for enwik8 in the paper is published as 277M. A compression of
    # 3 d^2 + d per layer is added.
    good "enwik8 without compressed memory" . --preset enwik8 --cmem 0 --dry-run
    check "enwik8 without compression: 277 million, $(parameters)" \
        [ $(($(parameters) / 1000000)) -eq 277 ]
    check "enwik8 with compression: 24 compressions more" \
        [ $(($(parameters) + 24 * (3 * 1024 * 1024 + 1024))) -eq 353036493 ]
}
family_variants() {
    variant "adamw" --data ../t.txt $full --optim adamw --lr 0.003 --weight-decay 0.01 --glu \
        --tied --final-norm --kv-heads 1 --emb-sz 12
    variant "gru, random pieces, muon" --data ../t.txt $full --gate gru --random-segments 4 \
        --optim muon --lr 0.003 --momentum 0.9
    variant "xl, post-norm, gtrxl" --data ../t.txt $full --positions xl --norm-after --gate gtrxl \
        --gate-relu
    variant "most used" --data ../t.txt $full --aux-dropout 0 --compress used --memory-layers 2
    variant "auto-encoding, overlap" --data ../t.txt $full --aux-dropout 0 --aux autoencode \
        --overlap 2
    variant "dilated, through later segments" --data ../t.txt $full --compress dilated \
        --dilations 1,2 --recurrence none --aux-dropout 0 --aux bptt --bptt 2
    variant "mean, memories of several sizes" --data ../t.txt $full --aux-dropout 0 \
        --compress mean --mems 8,24 --cmems 0,5 --recurrence none --ratio 3
    variant "as the reference has it" --data ../t.txt $full --recurrence rotate --literal \
        --gate gru --mogrify --mem 32 --random-segments 4
}
rates() { events "$1" | field lr | awk '{ printf "%.5f ", $1 }'; }
aux() {
    events "$1" | sed 's/.*"aux":\[\([^]]*\)\].*/\1/' |
        awk -F, '{ printf "%s ", ($1 > 0 && $2 > 0 ? "some" : $1 == 0 && $2 == 0 ? "none" : "?") }'
}
gradients() { # FILE: the numbers of its entry "grads"
    at=$(header "$1" | sed 's/.*"grads":{[^}]*"data_offsets":\[\([0-9]*\),\([0-9]*\)\].*/\1 \2/')
    tail -c +$((9 + $(header_size "$1") + ${at% *})) "$1" | head -c $((${at#* } - ${at% *})) |
        od -An -v -tf4 -w4
}
literal_forms() {
    # old: 30 steps with one flag per form, --literal-rows, -pad, -target, -freeze.
    # The first version continues to a loss of 2.7059; without the flags it is 2.6904.
    mkdir forms
    cp "$here/old/compressive_literal.safetensors" forms/run.st
    cp forms/run.st forms/again.st
    cp forms/run.st forms/bits.st
    good "a checkpoint with one flag per literal form" forms --checkpoint run.st --data ../t.txt \
        --steps 60 --threads 1 --log log.jsonl
    check "one flag per form: continues with those forms" \
        awk -v got="$(events forms/log.jsonl eval | field loss)" \
        'BEGIN { e = got - 2.7059; exit !(e < 0.005 && -e < 0.005) }'
    check "one flag per form: the checkpoint now has a list" \
        [ "$(header forms/run.st | grep -c '\\"literal\\":\\"rows,pad,target,freeze\\"')" -eq 1 ]
    good "one flag per form: the same with its flags given" forms --checkpoint again.st \
        --data ../t.txt --steps 60 --threads 1 --literal-rows --literal-pad --literal-target \
        --literal-freeze
    check "its flags given: bit-exactly the same" same_state forms/run.st forms/again.st
    good "one flag per form: the same with the list given" forms --checkpoint bits.st \
        --data ../t.txt --steps 60 --threads 1 --literal freeze,target,pad,rows
    check "the list given: bit-exactly the same" same_state forms/run.st forms/bits.st
    cd forms
    refused '--literal is true here .from the command line. but rows,pad,target,freeze in the checkpoint' \
        --checkpoint run.st --data ../t.txt --steps 90 --literal
    refused '--literal is false here' --checkpoint run.st --data ../t.txt --steps 90 --no-literal
    refused '--literal is false here' --checkpoint run.st --data ../t.txt --eval-only --no-literal
    cd ..
    good "--init-from drops forms that only training depends on" forms --init-from run.st \
        --data ../t.txt --steps 2 --threads 1 --literal rows,pad --checkpoint tuned.st
    check "--init-from: has the forms that were given" \
        [ "$(header forms/tuned.st | grep -c '\\"literal\\":\\"rows,pad\\"')" -eq 1 ]

    good "--literal without names" forms $tiny --data ../t.txt --steps 12 --literal \
        --checkpoint all.st
    check "--literal without names is stored as such" \
        [ "$(header forms/all.st | grep -c '\\"literal\\":true')" -eq 1 ]
    good "all forms by name" forms $tiny --data ../t.txt --steps 12 \
        --literal rows,pad,target,mask,freeze --checkpoint named.st
    check "all forms by name: the same training" same_state forms/all.st forms/named.st
    # all but some, also if others do not apply
    while read -r but names; do
        good "--literal, $but" forms $tiny --data ../t.txt --steps 12 --literal \
            $(echo "$but" | tr , ' ') --checkpoint but.st
        good "--literal with the names $names" forms $tiny --data ../t.txt --steps 12 \
            --literal "$names" \
            --checkpoint these.st $(echo "$but" | tr , '\n' | grep -v literal | tr '\n' ' ')
        check "--literal, $but: the same training" same_state forms/but.st forms/these.st
        rm -f forms/but.st forms/these.st
    done <<'END2'
--no-literal-pad rows,target,mask,freeze
--no-literal-pad,--positions,xl target,mask,freeze
--no-literal-rows,--no-literal-mask,--compress,mean off
END2
    good "--literal without one form" forms $tiny --data ../t.txt --steps 12 --literal \
        --no-literal-pad \
        --checkpoint but.st
    check "--literal without one form is stored as such" \
        [ "$(header forms/but.st | grep -c '\\"literal\\":\\"all,no-pad\\"')" -eq 1 ]
    good "--literal without one form: resumed by the same command" forms $tiny \
        --data ../t.txt --steps 14 --literal \
        --no-literal-pad --checkpoint but.st
    good "--literal with other positions" forms $tiny --data ../t.txt --steps 12 \
        --positions xl --literal --checkpoint xl.st
    good "the forms of that model by name" forms $tiny --data ../t.txt --steps 12 --positions xl \
        --literal pad,target,mask,freeze --checkpoint xl_named.st
    check "the forms of that model by name: the same training" \
        same_state forms/xl.st forms/xl_named.st
}
family_more() {
    literal_forms
    mkdir steps
    plain="$tiny --data ../t.txt --log-every 1"
    good "a batch in one part" steps $plain --steps 30 --lr 0.01 --log one.jsonl
    good "a batch in four parts" steps $plain --steps 30 --lr 0.01 --log four.jsonl --batch-split 4
    events steps/one.jsonl | field loss >a; events steps/four.jsonl | field loss >b
    check "parts change only the rounding" \
        sh -c "paste a b | awk '{ e = \$1 - \$2; if (!(e < 1e-3 && -e < 1e-3)) bad = 1 }
            END { exit bad || NR != 30 }'"
    good "learning rates" steps $plain --steps 8 --lr 1 --lr-start 0.2 --lr-min 0.1 --lr-warmup 4 \
        --schedule cosine --log rates.jsonl
    check "rates: up from 0.2 to 1 in four steps, down to 0.1: $(rates steps/rates.jsonl)" \
        [ "$(rates steps/rates.jsonl)" \
        = "$(awk '
            BEGIN {
                for (n = 1; n <= 8; n++)
                    printf "%.5f ", n < 4 ? 0.2 + 0.8 * n / 4 \
                        : 0.1 + 0.45 * (1 + cos(atan2(0, -1) * (n - 4) / 4))
            }')" ]

    # Updates after steps 1, 2, 3, 7 and 11. Parameters do not change in between, so the
    # losses are those of learning rate 0.
    good "four steps per update" steps $plain --steps 8 --lr 0.01 --log every.jsonl \
        --update-every 4 --update-after 3
    good "three steps" steps $plain --steps 3 --lr 0.01 --checkpoint three.st
    cp steps/three.st steps/still.st
    good "three steps, then without updates" steps --data ../t.txt --checkpoint still.st \
        --steps 8 --lr 0 --log still.jsonl --log-every 1 --threads 1
    events steps/every.jsonl | field loss >a; events steps/still.jsonl | field loss >b
    check "four steps without an update: the losses of rate 0" \
        [ "$(sed -n 4,7p a)" = "$(head -n 4 b)" ]
    check "after the update the losses differ" [ "$(sed -n 8p a)" != "$(sed -n 5p b)" ]
    for every in 2 4; do
        good "one of $every steps of an update" steps $plain --steps 1 --checkpoint g$every.st \
            --update-every $every
    done
    gradients steps/g2.st >a; gradients steps/g4.st >b
    check "gradients are means: each step counts a half, or a quarter" \
        sh -c "paste a b | awk '{ e = \$1 - 2 * \$2; n += \$1 != 0 }
            e * e > 1e-12 * \$1 * \$1 { bad = 1 }
            END { exit bad || n < 1000 }'"
    cd steps
    refused 'g4.st.*gradients of 1 of 4 steps.*--update-every' \
        --data ../t.txt --checkpoint g4.st --steps 5 --update-every 2 --threads 1
    refused 'g4.st.*gradients of 1 of 4 steps.*--update-after' \
        --data ../t.txt --checkpoint g4.st --steps 5 --update-after 1 --threads 1
    cd ..

    # the first segment of a piece fills the memory, the second compresses it
    good "pieces of two segments" steps $plain --steps 6 --random-segments 2 --log pieces.jsonl
    check "each piece begins with an empty memory: $(aux steps/pieces.jsonl)" \
        [ "$(aux steps/pieces.jsonl)" = "none some none some none some " ]
    good "parallel streams" steps $plain --steps 6 --log streams.jsonl
    check "streams keep their memory: $(aux steps/streams.jsonl)" \
        [ "$(aux steps/streams.jsonl)" = "none some some some some some " ]

    # four steps with a group of four streams each, and an update after them, are one step
    # of 16 streams in four parts
    together="$tiny --dropout 0 --lr 0.002 --schedule constant --lr-warmup 0 --data ../t.txt"
    good "groups of streams" steps $together --streams 16 --update-every 4 --steps 80
    cp out groups
    good "streams in parts" steps $together --batch-sz 16 --batch-split 4 --steps 20
    check "groups and parts read the same blocks: $(tail -n 1 groups), $(tail -n 1 out)" \
        [ "$(grep -o 'step 80: valid .*' groups | cut -d: -f2)" \
        = "$(grep -o 'step 20: valid .*' out | cut -d: -f2)" ]

    # Perplexity per word, from pieces of words and from bytes. The held-out text is the
    # second last twentieth.
    good "--data-unit word-ppl of bytes" steps $plain --steps 3 --data-unit word-ppl \
        --log word.jsonl
    n=$(wc -c <t.txt)
    v=$((n - n / 20 * 2)) w=$((n / 20))
    words=$(tail -c +$((v + 1)) t.txt | head -c $((n - n / 20 - v)) | wc -w)
    check "word-ppl of bytes: exp(nats / $words words)" \
        awk -v l="$(events steps/word.jsonl eval | field loss)" \
        -v p="$(events steps/word.jsonl eval | field word_ppl)" -v n=$w -v words="$words" \
        'BEGIN { e = log(p) - l * n / words; exit !(p > 1 && e < 1e-9 && -e < 1e-9) }'
    mkdir steps/pieces steps/whole
    for f in train valid test; do
        awk '
            BEGIN {
                for (i = 0; i < 60; i++) print "\342\226\201un break able \342\226\201things"
            }' >steps/pieces/$f.txt
        awk 'BEGIN { for (i = 0; i < 60; i++) print "un break able things" }' >steps/whole/$f.txt
    done
    good "word-ppl of pieces of words" steps $tiny --data pieces --tokens words \
        --data-unit word-ppl --steps 3 --log p.jsonl
    good "word-ppl of whole words" steps $tiny --data whole --tokens words --data-unit word-ppl \
        --steps 3 --log w.jsonl
    check "word-ppl: two words of five tokens: exp(2.5 nll)" \
        awk -v l="$(events steps/p.jsonl eval | field loss)" \
        -v p="$(events steps/p.jsonl eval | field word_ppl)" \
        'BEGIN { e = log(p) - 2.5 * l; exit !(p > 1 && e < 1e-9 && -e < 1e-9) }'
    check "word-ppl: four words of five tokens: exp(1.25 nll)" \
        awk -v l="$(events steps/w.jsonl eval | field loss)" \
        -v p="$(events steps/w.jsonl eval | field word_ppl)" \
        'BEGIN { e = log(p) - 1.25 * l; exit !(p > 1 && e < 1e-9 && -e < 1e-9) }'
}
# options that a checkpoint decides
fixed_options() {
    cat <<END2
--nlayers 3
--hid-sz 32
--emb-sz 8
--inner-hid-sz 64
--nheads 4
--kv-heads 1
--block-sz 32
--positions xl
--no-norm-after
--final-norm
--glu
--tied
--gate gtrxl
--gate-relu
--gate-bias 1
--no-gate-bias
--mogrify
--memory-layers 2
--mem 8
--cmem 4
--mems 8,8
--cmems 4,4
--recurrence none
--compress mean
--ratio 2
--overlap 1
--conv-no-bias
--dilations 1,2
--aux autoencode
--bptt 2
--literal
--literal rows,mask
--tokens chars
--min-count 3
--optim adamw
--momentum 0.5
--batch-sz 8
--batch-split 4
--random-segments 2
--precision bf16
END2
}
# sed scripts that keep the length of a checkpoint's header
spoils() {
    cat <<'END2'
s/seqtx.compressive\.1"/seqtx.compressive.9"/
s/\\"nlayers\\":2/\\"nlayers\\":3/
s/\\"hid-sz\\":16/\\"hid-sz\\":24/
s/\\"nheads\\":2/\\"nheads\\":3/
s/\\"mem\\":16/\\"mem\\":17/
s/\\"cmem\\":8/\\"cmem\\":9/
s/\\"cmem\\":8/\\"cmem\\":0/
s/\\"ratio\\":4/\\"ratio\\":2/
s/\\"ratio\\":4/\\"ratio\\":0/
s/\\"memory-layers\\":\\"all\\"/\\"memory-layers\\":\\"2,2\\"/
s/\\"compress\\":\\"conv\\"/\\"compress\\":\\"used\\"/
s/"memory\.0\.mem\./"memory.0.men./
s/"memory\.0\.seen\.0"/"memory.0.seem.0"/
s/"optim.kind":"[0-9]"/"optim.kind":"1"/
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
    refused '--nheads.*--hid-sz' $t $tiny $new --nheads 3
    refused '--kv-heads: expected a divisor of --nheads, got 3' \
        $t $tiny $new --nheads 4 --kv-heads 3
    refused '--memory-layers 3: expected layers from 1 to 2 .--nlayers., got 3' \
        $t $tiny $new --memory-layers 3
    refused '--memory-layers 0: expected layers from 1 to 2 .--nlayers., got 0' \
        $t $tiny $new --memory-layers 0
    refused '--memory-layers 2,1,2: expected each layer at most once, got 2 twice' \
        $t $tiny $new --memory-layers 2,1,2
    refused '--memory-layers some: expected all' $t $tiny $new --memory-layers some
    refused '--memory-layers 1,,2: expected all' $t $tiny $new --memory-layers 1,,2
    for name in mem cmem; do
        refused "--$name:" $t $tiny $new --$name -1
        refused "--$name:" $t $tiny $new --$name 1073741825
        refused "--${name}s 4: expected 2 numbers" $t $tiny $new --${name}s 4
        refused "--${name}s 4,4,4: expected 2 numbers" $t $tiny $new --${name}s 4,4,4
        refused "--${name}s 4,x: expected 2 numbers" $t $tiny $new --${name}s 4,x
        refused "--${name}s 4,1073741825: .*at most" $t $tiny $new --${name}s 4,1073741825
    done
    refused '--ratio' $t $tiny $new --ratio 1048577
    refused '--overlap has no effect: it applies only to --compress conv' \
        $t $tiny $new --overlap 2 --compress mean
    refused '--dilations 1,0: expected up to 8 numbers' \
        $t $tiny $new --compress dilated --dilations 1,0
    refused '--dilations 1,2,3,4,5,6,7,8,9: expected up to 8 numbers' \
        $t $tiny $new --compress dilated --dilations 1,2,3,4,5,6,7,8,9
    refused '--dilations' $t $tiny $new --dilations 1,2
    refused '--aux: expected none, because this compression has no parameters, got attention' \
        $t $tiny $new --compress max --aux attention
    refused '--bptt has no effect: it applies only to --aux bptt' $t $tiny $new --bptt 2
    refused '--compress.*did you mean used' $t $tiny $new --compress use
    refused '--gate' $t $tiny $new --gate lstm
    refused '--gate-bias' $t $tiny $new --gate-bias 1
    refused '--mogrify has no effect: it applies only to --gate gru' $t $tiny $new --mogrify
    refused '--mems, --cmems: expected equal sizes for all memory layers with --recurrence rotate, got M = 8 and C = 8 in layer 1, but M = 16 and C = 8 in layer 2' \
        $t $tiny $new --recurrence rotate --mems 8,16
    refused '--hid-sz: expected an even number with --positions xl, got 15' \
        $t $tiny $new --positions xl --hid-sz 15 --nheads 1
    refused '--literal rows requires --positions learned; --literal without names selects' \
        $t $tiny $new --positions xl --literal rows
    refused '--literal rows requires --positions learned' \
        $t $tiny $new --positions xl --literal-rows
    refused '--literal pad requires --compress conv' $t $tiny $new --compress mean --literal pad
    refused '--literal target requires --aux attention' \
        $t $tiny $new --compress mean --literal-target
    refused '--literal mask requires a --compress other than used' \
        $t $tiny $new --compress used --literal mask
    refused '--literal freeze requires --aux attention' $t $tiny $new --aux none --literal freeze
    refused "--literal: expected on, off, or any of rows, pad, target, mask, freeze, got 'row' .did you mean rows" \
        $t $tiny $new --literal row
    refused '--streams and --random-segments cannot be combined' \
        $t $tiny $new --streams 8 --random-segments 2
    refused '--random-segments 1000: expected a training text of at least [0-9]* tokens .*, got [0-9]*' \
        $t $tiny $new --random-segments 1000
    refused '--eval-mem' $t $tiny $new --eval-mem -2
    refused '--eval-mem 8: no layer' $t $tiny $new --memory-layers none --eval-mem 8
    refused '--eval-cmem 8: .*no compressed memory' \
        $t $tiny $new --compress none --cmem 0 --eval-cmem 8
    refused '--eval-mem, --eval-cmem: .*1000000000.*--max-memory' \
        $t $tiny $new --positions xl --eval-cmem 1000000000
    refused '--cmem, --cmems: --compress none has no compressed memory' \
        $t $tiny $new --compress none
    refused '--aux: no layer has a compressed memory' $t $tiny $new --cmem 0 --aux attention
    refused '--update-after 5 requires --update-every 2 or more' \
        $t $tiny $new --update-after 5
    refused '--eval-cmem: .*--literal rows' $t $tiny $new --literal rows --eval-cmem 100
    refused '--eval-positions: expected a multiple of --block-sz 16, got 7' \
        $t $tiny $new --eval-positions 7
    refused '--data-unit' $t $tiny $new --data-unit words
    tr -d 'a-z0-9' <t.txt >blank.txt
    refused 'word-ppl: a text contains no words' \
        --data blank.txt $tiny $new --data-unit word-ppl --block-sz 8
    refused 'best.*eval-every' $t $tiny $new --best B.st --eval-every 0
    refused 'max-memory' $t $tiny $new --hid-sz 536870912
    refused 'max-memory' $t $tiny $new --mem 1000000000
    refused 'more parameters than can be counted' \
        --nlayers 4096 --hid-sz 536870912 --nheads 256 --inner-hid-sz 1073741824 --gate gtrxl \
        --dry-run
}
family_evaluation() {
    first=$(head -n 1 eval/only1.jsonl | field loss)
    good "evaluation with the memory sizes of training given" eval --checkpoint often.st \
        --eval-only --eval-mem 16 --eval-cmem 8 --log same.jsonl --threads 1
    check "evaluation with the sizes of training: the same loss" \
        [ "$(head -n 1 eval/same.jsonl | field loss)" = "$first" ]
    for more in "--eval-cmem 32" "--eval-cmem 0" "--eval-mem 40" "--eval-mem 0 --eval-cmem 3"; do
        good "evaluation with another memory, $more" eval --checkpoint often.st --eval-only $more \
            --log other.jsonl --threads 1
        check "$more: another loss" \
            [ "$(tail -n 2 eval/other.jsonl | head -n 1 | field loss)" != "$first" ]
        check "$more: as many tokens" \
            [ "$(tail -n 2 eval/other.jsonl | head -n 1 | field tokens)" \
            = "$(head -n 1 eval/only1.jsonl | field tokens)" ]
    done
    good "losses by position" eval --checkpoint often.st --eval-only --eval-positions 64 --threads 1
    check "losses by position: three parts" \
        grep -q "^loss by tokens since an empty memory: 0-16 [0-9.]*, 16-32 [0-9.]*, 32-64 [0-9.]*\$" "$T/out"
    good "losses by position with an empty memory" eval --checkpoint often.st --eval-only \
        --eval-positions 16 --eval-mem 0 --eval-cmem 0 --threads 1
    check "losses by position with an empty memory: one part" \
        [ "$(sed -n 's/^loss by tokens since an empty memory: [0-9-]* //p' "$T/out")" \
        = "$(sed -n 's/.* valid .*(loss \(.*\))/\1/p' "$T/out")" ]
    good "generation with another memory" eval --checkpoint often.st --no-train --generate 40 \
        --eval-mem 3 --eval-cmem 20 --threads 1
    check "curves of the auxiliary loss" grep -q 'compression/loss_layer_1' log/deep/tb/*
    check "curves of what compression loses" grep -q 'compression/ratio_layer_2' log/deep/tb/*
    # 0 in the first step and where the text restarts
    check "the log has them: 300 steps, of which most compress" \
        [ "$(aux log/log.jsonl | tr ' ' '\n' | grep -c some)" -gt 250 \
        -a "$(aux log/log.jsonl | grep -c '?')" -eq 0 ]
    good "--memory-layers none" log --data ../t.txt $tiny --memory-layers none --steps 20 \
        --generate 10 --prompt "the" --log none.jsonl
    check "--memory-layers none: no message about compression" \
        [ "$(cat out err | grep -c 'compression')" -eq 0 ]
    check "--memory-layers none: empty lists in the log" \
        grep -q '"aux":\[\],"ratio":\[\]}$' log/none.jsonl
}
family_small_presets() {
    for preset in reference enwik8; do
        good "$preset, with the smallest sizes" log --preset $preset $sizes --memory-layers 2 \
            --data ../t.txt --random-segments 4 --steps 6
    done
    for preset in readme wikitext103 pg19; do
        good "$preset, with the smallest sizes" log --preset $preset $sizes --emb-sz 0 \
            --data ../w.txt --steps 4
    done
}
# options without effect on the smallest model
useless() {
    cat <<'END2'
--gate-relu
--gate-bias 1 --gate input
--no-gate-bias
--mogrify
--overlap 2 --compress mean
--conv-no-bias --compress mean
--dilations 1,2
--bptt 2
--aux-dropout 0.1 --aux bptt
--aux-weight 2 --aux none
--lr-start 0.1 --lr-warmup 0
--lr-min 0.1
--momentum 0.5
END2
}

# the clusters and tied tables of a vocabulary that grows: 3 tensors are the embedding, and
# the weight and the bias of the output
family_grows() {
    grows "grown, tied" w.txt n.txt 7 2 --tokens words --tied
}
