# style.awk - the measurements of style.sh for one file: a small lexer for C that skips
# comments, strings and preprocessor lines and follows braces, parentheses and conditional
# operators.

function violation(what, line) {
    if (check) printf "%s:%d: %s\n", file, line, what
    bad++
}

# A conditional operator starts. Active ones are kept with their depth of parentheses.
function question() {
    for (k = 1; k <= asks; k++)
        if (ask_paren[k] <= paren) {
            nested++
            violation("nested ?:", NR)
            break
        }
    ask_paren[++asks] = paren
}

# An expression ends at this depth of parentheses: so do its conditional operators.
function expression_ends(depth) {
    while (asks > 0 && ask_paren[asks] >= depth) asks--
}

function statement_ends() {
    expression_ends(0)
    here++
    if (brace == 0) {
        if (head ~ /^static / && head ~ /\)$/ && head !~ /[={]/ && head !~ /typedef/) {
            forward++
            violation("static forward declaration", NR)
        }
        head = ""
    }
}

function open_brace() {
    if (brace == 0) {
        is_function = (head ~ /\)( (const|noexcept|STX_[A-Z_]*))*$/)
        is_type = (head ~ /(^| )(struct|enum|union)( |$)/ && head !~ /\)/)
        began = head_line
    }
    brace += (head ~ /^extern *"/ && brace == 0) ? 0 : 1
    expression_ends(0)
}

function close_brace() {
    if (brace > 0) brace--
    if (brace == 0) {
        if (is_function) {
            length_of[++functions] = NR - began + 1
            one_line = (began == NR)
        }
        head = ""
        closed_at = NR
        closed_one_line = (began == NR)
    }
    expression_ends(0)
}

{
    text = $0
    lines++
    width = length(text)
    trimmed = text
    gsub(/^[ \t]+|[ \t]+$/, "", trimmed)
    if (text ~ /style: table/) table = 1
    if (text ~ /style: end/) table = 0
    if (trimmed == "") {
        blank++
        next
    }
    # what is code on this line: everything outside comments
    in_comment_before = comment
    here = 0
    starts = 0
    code = 0
    first_brace = brace
    first_paren = paren
    directive = continued || (!comment && trimmed ~ /^#/)
    n = length(text)
    i = 1
    while (i <= n) {
        c = substr(text, i, 1)
        two = substr(text, i, 2)
        if (comment) {
            if (two == "*/") {
                comment = 0
                i += 2
                continue
            }
            i++
            continue
        }
        if (two == "/*") {
            comment = 1
            i += 2
            continue
        }
        if (two == "//") break
        if (c == " " || c == "\t") {
            if (head != "" && head !~ / $/ && brace == 0) head = head " "
            i++
            continue
        }
        code = 1
        if (directive) {
            i++
            continue
        }
        if (c == "\"" || c == "'") {
            q = c
            i++
            while (i <= n && substr(text, i, 1) != q) {
                if (substr(text, i, 1) == "\\") i++
                i++
            }
            i++
            if (brace == 0) head = head "\""
            continue
        }
        if (brace == 0 && head == "") head_line = NR
        if (c == "(" || c == "[") paren++
        else if (c == ")" || c == "]") {
            expression_ends(paren)
            if (paren > 0) paren--
        } else if (c == "{") {
            sub(/ +$/, "", head)
            open_brace()
        } else if (c == "}") close_brace()
        else if (c == "?") question()
        else if (c == ",") expression_ends(paren)
        else if (c == ";" && paren == 0) {
            sub(/ +$/, "", head)
            statement_ends()
        }
        if (brace == 0 && c != "}" && c != ";") head = head c
        i++
    }
    continued = directive && text ~ /\\$/
    if (code && !table && width > 100) {
        wide++
        violation(width " columns of code", NR)
    }
    if (!code && !table && width > 90) {
        wide_text++
        violation(width " columns of comment", NR)
    }
    # more than one statement; a one-line definition counts as one
    if (here >= 2 && !directive) {
        whole = (first_brace == 0 && brace == 0 && trimmed ~ /\}/)
        label = (trimmed ~ /^(case |default)/ && here == 2 && trimmed ~ /break;/)
        if (!(whole && (is_type || here == 1)) && !label && !table) {
            multi++
            violation(here " statements", NR)
        }
    }
    # a definition below a closing brace. One-line definitions may form a group
    if (previous_closed == NR - 1 && code && !directive && trimmed !~ /^}/ && first_brace == 0) {
        if (!(previous_one_line && closed_at == NR && closed_one_line)) {
            glued++
            violation("no blank line above this definition", NR)
        }
    }
    if (previous_closed == NR - 1 && !code && NR > 1 && trimmed ~ /^\/[*\/]/) {
        glued++
        violation("no blank line above this comment of a definition", NR)
    }
    if (closed_at == NR) {
        previous_closed = NR
        previous_one_line = closed_one_line
    }
}

END {
    for (a = 2; a <= functions; a++) {
        v = length_of[a]
        for (b = a - 1; b > 0 && length_of[b] > v; b--) length_of[b + 1] = length_of[b]
        length_of[b + 1] = v
    }
    half = int((functions + 1) / 2)
    ninth = int(functions * 0.9 + 0.5)
    printf "%-34s %6d %5.1f%% %8d %7d ", file, lines, 100 * blank / (lines ? lines : 1), wide,
        wide_text
    printf "%5d %5d %6d %7d ", glued, multi, nested, forward
    printf "%9d %6d %4d %4d\n", functions, length_of[half], length_of[ninth],
        length_of[functions]
    exit check && bad > 0
}
