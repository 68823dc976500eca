# parts.awk - the include graph of src/. Reads all parts (arguments), in the order of the
# generated files, and prints
#     edge FROM TO        part FROM includes part TO
#     error TEXT          FROM uses a name that TO defines but does not include TO; or
#                         includes TO but uses nothing from it; or uses a function of a
#                         part that its folder may not use
# `may` lists what each folder may use: "ops:gemm,core train:ops,core ..". A name that is
# also defined in a part that begins with `given` needs no include. Names begin with one of
# `prefixes` ("stx|STX") and "_".
#
# A name is defined where it is followed by ( { ; = [ or a comma outside of parentheses,
# and outside of braces or in those of an enum. Names of macros are defined by #define.

function folder(part) {
    return split(part, piece, "/") > 2 ? piece[2] : "top"
}

# Splits a line without comments and strings into words and single characters. The argument
# of STX_KERNEL is a definition. "struct name" alone is no use: an incomplete type.
function scan(line,    word) {
    while (line != "") {
        if (match(line, /^[A-Za-z_0-9]+/)) {
            word = substr(line, 1, RLENGTH)
            line = substr(line, RLENGTH + 1)
            if (word == "enum") in_enum = 1
            name = ""
            if (word ~ name_pattern) {
                name = word
                if (kernel) define(word)
                else if (last != "struct") uses[part] = uses[part] " " word
            }
            kernel = 0
            last = word
        } else {
            word = substr(line, 1, 1)
            line = substr(line, 2)
            if (word == " ") continue
            if (name != "" && !paren && (!brace || (in_enum && brace == 1)) && index("({;=[,}", word))
                define(name)
            if (word == "(") paren++
            kernel = word == "(" && last ~ /^STX_+KERNEL$/
            if (word == ")") paren--
            if (word == "{") brace++
            if (word == "}" && !--brace) in_enum = 0
            if (word == ";" && !brace) in_enum = 0
            name = ""
        }
    }
}

function define(what) {
    if (what in macro) return
    if (!((part, what) in here)) {
        here[part, what] = 1
        owners[what] = owners[what] " " part
        declared[part] = declared[part] " " what
    }
}

BEGIN {
    if (prefixes == "") prefixes = "stx|STX"
    name_pattern = "^(" prefixes ")_"
}

FNR == 1 {
    part = FILENAME
    order[++parts] = part
    is_part[part] = 1
    brace = paren = in_enum = comment = 0
    dir = part
    sub(/[^\/]*$/, "", dir)
}

/^#include "/ {
    to = $2
    gsub(/"/, "", to)
    to = dir to
    while (match(to, /[^\/]+\/\.\.\//))
        to = substr(to, 1, RSTART - 1) substr(to, RSTART + RLENGTH)
    includes[part] = includes[part] " " to
    next
}

{
    line = $0
    while (1) {
        if (comment) {
            if (!(at = index(line, "*/"))) next
            line = substr(line, at + 2)
            comment = 0
        }
        if (!(at = index(line, "/*"))) break
        rest = substr(line, at + 2)
        if (end = index(rest, "*/")) line = substr(line, 1, at - 1) " " substr(rest, end + 2)
        else {
            scan(substr(line, 1, at - 1) " ")
            comment = 1
            next
        }
    }
    sub(/^ *\/\/.*/, "", line)
    gsub(/\\"/, "", line)
    gsub(/"[^"]*"/, "\"\"", line)
    gsub(/'[^']*'/, "0", line)
    if (line ~ /^ *#/ || continued) {
        if (line ~ /^ *# *define/) {
            word = line
            sub(/^ *# *define +/, "", word)
            sub(/[^A-Za-z_0-9].*/, "", word)
            define(word)
            macro[word] = 1
        }
        rest = line
        while (match(rest, "(" prefixes ")_[A-Za-z_0-9]*")) {
            uses[part] = uses[part] " " substr(rest, RSTART, RLENGTH)
            rest = substr(rest, RSTART + RLENGTH)
        }
        continued = line ~ /\\$/
        next
    }
    scan(line " ")
}

END {
    n = split(may, rule, " ")
    for (i = 1; i <= n; i++) {
        split(rule[i], piece, ":")
        m = split(piece[2], to_folder, ",")
        for (k = 1; k <= m; k++) allowed[piece[1], to_folder[k]] = 1
    }
    for (i = 1; i <= parts; i++) {
        part = order[i]
        if (given != "" && index(part, given) == 1) continue
        delete direct
        n = split(includes[part], list, " ")
        for (k = 1; k <= n; k++) {
            if (!(list[k] in is_part)) continue     # seqtx.h, in a part for CUDA
            direct[list[k]] = 1
            print "edge", part, list[k]
        }
        delete seen
        n = split(declared[part], list, " ")
        for (k = 1; k <= n; k++)
            if (split(owners[list[k]], owner, " ") > 1) needed[part, owner[1]] = 1
        n = split(uses[part], list, " ")
        for (k = 1; k <= n; k++) {
            what = list[k]
            if (what in seen || (part, what) in here || !(what in owners)) continue
            seen[what] = 1
            m = split(owners[what], owner, " ")
            found = 0
            for (e = 1; e <= m; e++) {
                if (given != "" && index(owner[e], given) == 1) found = 1
                if (owner[e] in direct) {
                    found = 1
                    needed[part, owner[e]] = 1
                }
                f = folder(part)
                g = folder(owner[e])
                if (g != "api" && f != "api" && f != g && !((f, g) in allowed) && m == 1 + (folder(owner[1]) == "api"))
                    print "error", part ": uses " what ", but " f "/ may not use " g "/ (" owner[e] ")"
            }
            if (!found) print "error", part ": uses " what ", but does not include" owners[what]
        }
        for (to in direct)
            if (!((part, to) in needed) && to !~ /platform.h$/)
                print "error", part ": includes " to " but uses nothing from it"
    }
}
