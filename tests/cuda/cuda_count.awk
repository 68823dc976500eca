# cuda_count.awk - reads the output of `cuobjdump -sass` of one or more files. Counts the
# instructions of each kernel: in total, in its main loop, and in one iteration of that
# loop. Main loop: the shortest loop with the most matmul instructions (HMMA). Iteration:
# of the paths from its first instruction to the branch back, those with the most matmuls
# and copies, and of these the one with the fewest instructions: a tile inside of the
# window, without dropout, ramp or padding. A loop inside the main loop counts once.
# Branches: BRA, BSSY, BSYNC, CALL and similar. Group: the shortest loop inside the main
# loop with matmuls and powers (MUFU), counted in the same way: 16 keys of a tile at an
# edge of the window.
function clear() { n = 0; split("", op); split("", to); split("", free); split("", at) }
function kind(o) {
    sub(/\..*/, "", o)
    if (o ~ /^(BRA|BRX|BSSY|BSYNC|BREAK|CALL|RET|EXIT|WARPSYNC)$/) return "branch"
    return o
}
# Offers the path from i that continues at j, with copies (c 1) or without: more matmuls
# are better, then fewer instructions.
function offer(i, j, c,   h, m) {
    if (!((j, c) in most)) return
    h = most[j, c] + (op[i] ~ /^HMMA/); m = few[j, c] + 1
    if (op[i] ~ /^LDGSTS/) c = 1
    if ((i, c) in most && (h < most[i, c] || (h == most[i, c] && m >= few[i, c]))) return
    most[i, c] = h; few[i, c] = m; go[i, c] = j; changed = 1
}
# the ways from everywhere back to `head`, where `continue` goes, too
function ways(   i, j, c) {
    split("", most); split("", few); split("", go)
    for (i = head; i <= n; i++)
        if (op[i] ~ /^BRA/ && (to[i] in at) && at[to[i]] == head) {
            most[i, 0] = 0
            few[i, 0] = 1
            go[i, 0] = 0
        }
    do {
        changed = 0
        for (i = n; i >= 1; i--) for (c = 0; c < 2; c++) {
            if (op[i] ~ /^(EXIT|RET)/ && free[i]) continue
            if (!(op[i] ~ /^BRA/ && free[i]) && i < n) offer(i, i + 1, c)
            if (op[i] ~ /^BRA/ && (to[i] in at)) {
                j = at[to[i]]
                if (j != head && (j > i || sum[i] == sum[j - 1])) offer(i, j, c)
            }
        }
    } while (changed)
}
function finish(   i, j, c, d, best, h, loop, way, refused, first, last, all, group) {
    if (!name || !n) return
    split("", sum)
    sum[0] = powers[0] = 0
    for (i = 1; i <= n; i++) {
        sum[i] = sum[i - 1] + (op[i] ~ /^HMMA/)
        powers[i] = powers[i - 1] + (op[i] ~ /^MUFU/)
    }
    if (!sum[n]) return
    split("", refused)
    for (;;) {
        best = 0
        for (i = 1; i <= n; i++) if (op[i] ~ /^BRA/ && (to[i] in at) && at[to[i]] < i && !(i in refused)) {
            j = at[to[i]]; h = sum[i] - sum[j - 1]
            if (h > best || (h == best && h && i - j < back - head)) { best = h; head = j; back = i }
        }
        if (!best) return
        ways()
        if (((head, 0) in most && most[head, 0]) || ((head, 1) in most && most[head, 1])) break
        refused[back]           # the branch back from out-of-line code
    }
    split("", loop); split("", way)
    for (i = head; i <= back; i++) loop[kind(op[i])]++
    c = (head, 1) in most && (!((head, 0) in most) || most[head, 1] >= most[head, 0])
    d = c
    for (i = head; i; ) {
        way[kind(op[i])]++
        j = go[i, c]
        if (c && op[i] ~ /^LDGSTS/ &&
            !(((j, 1) in few) && few[j, 1] + 1 == few[i, 1] && most[j, 1] == most[i, 1])) c = 0
        i = j
    }
    first = head; last = back; all = few[head, d]; group = "| - | - |"
    for (i = first + 1; i < last; i++) if (op[i] ~ /^BRA/ && (to[i] in at) && at[to[i]] > first && at[to[i]] < i) {
        j = at[to[i]]
        if (sum[i] > sum[j - 1] && powers[i] > powers[j - 1] && (group ~ /-/ || i - j < back - head)) {
            head = j; back = i
            ways()
            if ((head, 0) in most) group = sprintf("| %d | %d |", few[head, 0], most[head, 0])
        }
    }
    printf "| %s | %d | %d | %d | %d | %d | %d | %d | %d | %d | %d %s\n", name, n,
        last - first + 1, loop["branch"], all,
        way["HMMA"], way["LDSM"], way["LDGSTS"], way["SHFL"], way["MUFU"], way["branch"], group
}
/^[ \t]*Function : / { finish(); clear(); name = $3; next }
/^[ \t]*\/\*[0-9a-f]+\*\// {
    line = $0
    sub(/^[ \t]*\/\*/, "", line)
    a = line; sub(/\*\/.*/, "", a)
    sub(/^[0-9a-f]+\*\/[ \t]*/, "", line); sub(/[ \t]*;.*/, "", line)
    guarded = sub(/^@[!A-Z0-9]+[ \t]+/, "", line)
    split(line, w, /[ \t]+/)
    n++
    at["0x" a] = n; sub(/^0+/, "", a); at["0x" (a == "" ? "0" : a)] = n
    op[n] = w[1]
    to[n] = ""; free[n] = !guarded
    if (w[1] ~ /^BRA/ && match(line, /0x[0-9a-f]+/)) {
        to[n] = substr(line, RSTART, RLENGTH)
        if (line !~ /^BRA[.A-Z]*[ \t]+0x/ || w[1] ~ /DIV|CONV/) free[n] = 0
    }
}
END { finish() }
