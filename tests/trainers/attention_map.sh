#!/bin/sh
# attention_map.sh - tests build/attention_map with all families: the picture is well-formed
# XML; its cells have the weights that -w writes, at their places and with the right
# opacity; special characters; the learned spans; bad input. Ends with "N passed, N failed".
. "$(dirname "$0")/programs.sh"
awk 'BEGIN { for (i = 0; i < 500; i++) print "the cat sat on mat " i % 7 " and ran" }' > t.txt
text=$(printf 'the dog & the cat sat <on> a "mat" and ran to the dog; caf\303\251')
text=$text$(printf ' and the \001\377 end. The cat sat.')

# Compares the cells of a picture with the weights. Panels begin with the first key that has
# a weight of 0.002 or more; a cell has 12 pixels.
compare() { # PICTURE WEIGHTS
    awk -F'\t' '
        FNR == NR {
            if (FNR == 1) next
            w[$1, $2, $3] = $7; sum[$1, $2] += $7
            if ($7 >= 0.002) { expected++; if (first == "" || $3 < first) first = $3 + 0 }
            next
        }
        /^<g class="ink">/ { panel++ }
        /<title>.*distance/ {
            split($0, a, "\"")      # x, y, width, height, opacity
            cell[++cells] = panel " " a[2] " " a[4] " " a[10]
            match($0, /: [0-9.]*<\/title>/)
            value[cells] = substr($0, RSTART + 2, RLENGTH - 10) + 0
        }
        # the panel: its upper left corner is that of the background
        /^<path class="seen"/ {
            match($0, /M[0-9. ]*/); split(substr($0, RSTART + 1, RLENGTH), b, " ")
            x0[panel + 1] = b[1]; y0[panel + 1] = b[2]
        }
        END {
            for (i = 1; i <= cells; i++) {
                split(cell[i], c, " ")
                key = (c[2] - x0[c[1]]) / 12 + first; query = (c[3] - y0[c[1]]) / 12
                v = w[c[1], query, key]
                if (v == "" || v < 0.002 || v - value[i] > 6e-5 || value[i] - v > 6e-5) bad++
                o = c[4] - sqrt(v); if (o > 0.006 || o < -0.006) bad++
            }
            for (r in sum) if (sum[r] > 1e-6 && (sum[r] > 1.00001 || sum[r] < 0.99999)) bad++
            print cells + 0, expected + 0, bad + 0
            exit cells < 100 || cells != expected || bad
        }' "$2" "$1"
}
kind() { awk -F'\t' -v kind="$2" '$4 == kind { n++ } END { exit !n }' "$1"; }

for family in span compressive par sru; do
    "$build/attention_map" -m $family -s 30 -t "$text" -w $family.tsv -o $family.svg t.txt 2> err
    check "$family: drawn: $(cat err)" [ $? -eq 0 ]
    check "$family: well-formed" xml $family.svg
    check "$family: cells and weights: $(compare $family.svg $family.tsv)" \
        compare $family.svg $family.tsv
    check "$family: four heads" [ "$(grep -c '>head [1-4]' $family.svg)" -eq 4 ]
    check "$family: memory and segment" grep -q 'class="faint">memory<' $family.svg
    check "$family: the kinds of keys" kind $family.tsv memory
done
check "compressive: compressed rows of four tokens" awk -F'\t' '
    $4 == "compressed" && $6 != 4 { bad = 1 } $4 == "compressed" { n++ }
    END { exit bad || !n }' compressive.tsv
check "compressive: their tokens are consecutive" awk -F'\t' '
    $2 || $1 > 1 || NR == 1 { next } NR > 2 && $5 != last { bad = 1 } { last = $5 + $6 }
    END { exit bad }' compressive.tsv
check "the learned spans" \
    [ "$(grep -c '>head [1-4]: span [0-9.]* tokens, ramp 8<' span.svg)" -eq 4 ]
check "a line for each span and each ramp" [ "$(grep -c '<path class="span"' span.svg)" -ge 8 ]
check "no span in other families" [ "$(grep -c '<path class="span"' par.svg)" -eq 0 ]
check "characters are escaped" grep -q '>&lt;<' compressive.svg
check "a character of two bytes" grep -q ">$(printf '\303\251')<" compressive.svg
check "dark backgrounds" grep -q 'prefers-color-scheme:dark' span.svg

# a checkpoint: words, and segments of the model's length
"$build/train_compressive" --data t.txt --tokens words --steps 2 --block-sz 16 --nlayers 1 \
    --checkpoint words.safetensors > log 2>&1
check "train_compressive: $(tail -n 1 log)" [ -s words.safetensors ]
"$build/attention_map" -c words.safetensors -w words.tsv -o words.svg t.txt 2> err
check "a checkpoint: drawn: $(cat err)" [ $? -eq 0 ]
check "a checkpoint: well-formed" xml words.svg
check "a checkpoint: cells and weights: $(compare words.svg words.tsv)" compare words.svg words.tsv
check "a checkpoint: a memory of four segments of 16 tokens" \
    [ "$(awk '$1 == 1 && $2 == 0 && $4 == "memory"' words.tsv | wc -l)" -eq 64 ]
check "a checkpoint: whole words" grep -q '<title>.* to ran, distance' words.svg
check "a checkpoint: whole words at the rows" grep -q '<text [^>]*class="row">ran<' words.svg
check "a checkpoint: whole words at the columns" grep -q 'class="word" .*rotate(-90)">ran<' words.svg
check "characters need no room" [ "$(grep -c 'class="word"' span.svg)" -eq 0 ]
check "a checkpoint: its name" grep -q 'layer 1 of 1 (words.safetensors)<' words.svg

# standard input, of which the last word may be cut; a text that is narrower than the titles
"$build/attention_map" -c words.safetensors -o cut.svg - < t.txt 2> err
check "standard input: $(cat err)" cmp cut.svg words.svg
"$build/attention_map" -s 0 -t "hi" -o short.svg t.txt 2> err
check "a short text: the titles are apart" \
    [ "$(sed -n 's/^<text x="\([0-9]*\)[^>]*>head [12]:.*/\1/p' short.svg | tr '\n' ' ' |
        awk '{ print ($2 - $1 >= 260) }')" = 1 ]

# text that ends in characters that are not ASCII
"$build/train_compressive" --data t.txt --tokens bytes --steps 2 --block-sz 16 --nlayers 1 \
    --checkpoint bytes.safetensors > log 2>&1
printf 'ab\316\273\316\273' > greek.txt
"$build/attention_map" -c bytes.safetensors -w greek.tsv -o greek.svg greek.txt 2> err
"$build/attention_map" -c bytes.safetensors -w given.tsv -o greek.svg -t "$(cat greek.txt)" 2>> err
check "all characters of a file: $(cat err)" cmp greek.tsv given.tsv
awk 'BEGIN { for (i = 0; i < 2000; i++) printf "x" }' > long.txt
"$build/attention_map" -c words.safetensors -o long.svg long.txt 2> err
check "a word that is longer than what is read: $(cat err)" grep -q "the word 'xxx" err

# refused
"$build/attention_map" -c . -t "hi" -o no.svg 2> err
check "a directory" [ $? -eq 1 -a ! -e no.svg ]
check "its message" grep -q -e '-c .: expected a checkpoint, got a directory' err
"$build/attention_map" -o no.svg - < t.txt 2> err
check "training on standard input" [ $? -eq 2 -a ! -e no.svg ]
"$build/attention_map" -c t.txt -o no.svg t.txt 2> err
check "not a checkpoint" [ $? -eq 1 -a ! -e no.svg ]
"$build/attention_map" -m gru -o no.svg t.txt 2> err
check "an unknown family" [ $? -eq 1 -a ! -e no.svg ]
check "its message" grep -q 'expected span, compressive, par or sru' err
"$build/attention_map" -c words.safetensors -t "$(head -n 1 t.txt)" -o given.svg 2> err
check "a checkpoint and a text" [ $? -eq 0 -a -s given.svg ]
"$build/attention_map" -o no.svg 2> err
check "no file" [ $? -eq 2 -a ! -e no.svg ]
"$build/attention_map" -m par -l 2 -s 1 -o no.svg t.txt 2> err
check "a block without attention" [ $? -eq 1 -a ! -e no.svg ]
check "its message" grep -q 'no attention' err
"$build/attention_map" -l 3 -s 1 -o no.svg t.txt 2> err
check "a layer that does not exist" [ $? -eq 1 -a ! -e no.svg ]
check "its message" grep -q -e '-l: expected a layer from 1 to 2, got 3' err
"$build/attention_map" -s 1 -o no.svg missing.txt 2> err
check "no text" [ $? -eq 1 -a ! -e no.svg ]
for options in "-l x" "-l 0" "-s 1x"; do
    "$build/attention_map" $options -o no.svg t.txt 2> err
    check "$options" [ $? -eq 2 -a ! -e no.svg ]
done
"$build/attention_map" -s 1 t.txt -o no.svg 2> err
check "an option after the file" [ $? -eq 2 -a ! -e no.svg ]
: > empty
for text in empty .; do
    "$build/attention_map" -c words.safetensors -o no.svg $text 2> err
    check "$text" [ $? -eq 1 -a ! -e no.svg ]
    check "its message" grep -q -e 'there is no text' -e '[.]: cannot read' err
done
"$build/attention_map" -s 1 -o none/no.svg t.txt 2> err
check "no directory" [ $? -eq 1 ]
check "its message" grep -q 'none/no.svg' err

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
