# parts.awk - checks the include graph of a set of parts, given in the order in which they
# are joined. Prints
#     edge FROM TO    part FROM includes part TO
#     error TEXT      a violation of one of these rules
#
#   - A part includes each part that defines a name which it uses, and no other, except
#     platform.h, which includes system headers. It also includes the part of src/api that
#     declares a function which it defines.
#   - A folder uses only folders that `may` allows, besides api: "ops:gemm,core io:core ..".
#
# A name that is also defined in a part that begins with `given` needs no include. Names
# begin with one of `prefixes` ("stx|STX") and "_".
#
# A name is defined by #define, as the argument of STX_KERNEL, or where it is followed by
# ( { ; = [ or a comma outside of parentheses, and outside of braces or in those of an
# enum. "struct name" alone is no use, because an incomplete type needs no definition.

function folder(part,    piece) {
    return split(part, piece, "/") > 2 ? piece[2] : "top"
}

function is_given(part) {
    return given != "" && index(part, given) == 1
}

function define(what) {
    if (what in macro || (part, what) in here) return
    here[part, what] = 1
    owners[what] = owners[what] " " part
    declared[part] = declared[part] " " what
}

# Returns a line without strings, character literals and comments. `comment` is 1 between
# the lines of a block comment.
function code_of(line,    out, c) {
    out = ""
    while (line != "") {
        if (comment) {
            if (!(c = index(line, "*/"))) return out
            line = substr(line, c + 2)
            comment = 0
            out = out " "
        } else if (match(line, /^"(\\.|[^"\\])*"/)) {
            out = out "\"\""
            line = substr(line, RLENGTH + 1)
        } else if (match(line, /^'(\\.|[^'\\])+'/)) {
            out = out "0"
            line = substr(line, RLENGTH + 1)
        } else if (substr(line, 1, 2) == "//") {
            return out
        } else if (substr(line, 1, 2) == "/*") {
            comment = 1
            line = substr(line, 3)
        } else {
            match(line, /^([^"'\/]+|.)/)
            out = out substr(line, 1, RLENGTH)
            line = substr(line, RLENGTH + 1)
        }
    }
    return out
}

# Splits code into words and single characters.
function scan(line,    word) {
    while (line != "") {
        if (match(line, /^[A-Za-z_0-9]+/)) {
            word = substr(line, 1, RLENGTH)
            line = substr(line, RLENGTH + 1)
            if (word == "enum" && !brace) in_enum = 1
            name = ""
            if (word ~ name_pattern) {
                if (kernel) define(word)
                else if (last != "struct") uses[part] = uses[part] " " word
                if (!value) name = word
            }
            kernel = 0
            last = word
        } else {
            word = substr(line, 1, 1)
            line = substr(line, 2)
            if (word == " ") continue
            if (name != "" && !paren && (!brace || (in_enum && brace == 1)) &&
                index("({;=[,}", word))
                define(name)
            if (word == "=" && in_enum && brace == 1) value = 1
            if (word == "," || word == "}") value = 0
            kernel = word == "(" && last ~ /^STX_+KERNEL$/
            if (word == "(") paren++
            if (word == ")") paren--
            if (word == "{") brace++
            if (word == "}" && !--brace) in_enum = 0
            if (word == ";" && !brace) in_enum = 0
            name = ""
        }
    }
}

# Called after a part. A rest means that the part was not understood.
function finish() {
    if (part != "" && (comment || paren))
        print "error", part ": a comment or a parenthesis is not closed"
}

# Returns whether part `from` may use part `to`.
function permitted(from, to,    f, g) {
    f = folder(from)
    g = folder(to)
    return f == g || f == "api" || g == "api" || may == "" || ((f, g) in allowed)
}

BEGIN {
    if (prefixes == "") prefixes = "stx|STX"
    name_pattern = "^(" prefixes ")_"
    n = split(may, rule, " ")
    for (i = 1; i <= n; i++) {
        split(rule[i], side, ":")
        m = split(side[2], to_folder, ",")
        for (k = 1; k <= m; k++) allowed[side[1], to_folder[k]] = 1
    }
}

FNR == 1 {
    finish()
    part = FILENAME
    order[++parts] = part
    is_part[part] = 1
    brace = paren = in_enum = comment = value = kernel = continued = 0
    name = last = ""
    dir = part
    sub(/[^\/]*$/, "", dir)
}

!comment && /^[ \t]*#[ \t]*include[ \t]*"/ {
    split($0, quoted, "\"")
    to = dir quoted[2]
    while (match(to, /[^\/]+\/\.\.\//))
        to = substr(to, 1, RSTART - 1) substr(to, RSTART + RLENGTH)
    includes[part] = includes[part] " " to
    next
}

{
    line = code_of($0)
    if (line !~ /^[ \t]*#/ && !continued) {
        gsub(/\t/, " ", line)
        scan(line " ")
        next
    }
    if (line ~ /^[ \t]*#[ \t]*define/) {
        word = line
        sub(/^[ \t]*#[ \t]*define[ \t]+/, "", word)
        sub(/[^A-Za-z_0-9].*/, "", word)
        define(word)
        macro[word] = 1
    }
    rest = line
    while (match(rest, /[A-Za-z_0-9]+/)) {
        word = substr(rest, RSTART, RLENGTH)
        if (word ~ name_pattern) uses[part] = uses[part] " " word
        rest = substr(rest, RSTART + RLENGTH)
    }
    continued = line ~ /\\$/
}

END {
    finish()
    for (i = 1; i <= parts; i++) {
        part = order[i]
        if (is_given(part)) continue
        split("", direct)
        n = split(includes[part], list, " ")
        for (k = 1; k <= n; k++) {
            if (!(list[k] in is_part)) continue     # such as seqtx.h, in a part for CUDA
            direct[list[k]] = 1
            print "edge", part, list[k]
            if (!permitted(part, list[k]))
                print "error", part ": includes " list[k] ", but " folder(part) "/ may not use " \
                    folder(list[k]) "/"
        }

        # the declarations of what it defines
        n = split(declared[part], list, " ")
        for (k = 1; k <= n; k++) {
            split(owners[list[k]], owner, " ")
            if (folder(owner[1]) != "api" || owner[1] == part) continue
            needed[part, owner[1]] = 1
            if (folder(part) != "api" && !(owner[1] in direct) && !is_given(owner[1]))
                print "error", part ": defines " list[k] ", but does not include " owner[1]
        }

        split("", seen)
        n = split(uses[part], list, " ")
        for (k = 1; k <= n; k++) {
            what = list[k]
            if (what in seen || (part, what) in here || !(what in owners)) continue
            seen[what] = 1
            m = split(owners[what], owner, " ")
            found = 0
            for (e = 1; e <= m; e++) {
                if (is_given(owner[e])) found = 1
                if (owner[e] in direct) {
                    found = 1
                    needed[part, owner[e]] = 1
                }
            }
            if (!found) print "error", part ": uses " what ", but does not include" owners[what]
            if (folder(owner[1]) == "api" && folder(part) != "api" && m == 2 &&
                !permitted(part, owner[2]))
                print "error", part ": uses " what ", but " folder(part) "/ may not use " \
                    folder(owner[2]) "/ (" owner[2] ")"
        }
        for (to in direct)
            if (!((part, to) in needed) && to !~ /\/platform\.h$/)
                print "error", part ": includes " to " but uses nothing from it"
    }
}
