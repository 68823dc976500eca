# man.awk -v name=NAME -v version=VERSION - makes a manual page from the --help all of a
# program of examples/: a description, a table of options in groups, presets, and a last
# paragraph. The head of the table marks the column of the meanings.

function roff(s) {
    gsub(/\\/, "\\e", s)
    gsub(/-/, "\\-", s)
    sub(/^[.\047]/, "\\\\\\&&", s)
    return s
}
function text(s) {
    sub(/^ +/, "", s)
    print roff(s)
}
function item(name, rest) { print ".TP\n\\fB" roff(name) "\\fR" rest }

# Prints the description; its first sentence is the title of the page.
function description(    title) {
    title = about
    sub(/[.:]( .*)?$/, "", title)
    title = tolower(substr(title, 1, 1)) substr(title, 2)
    printf ".TH \"%s\" 1 \"\" \"seqtx %s\" \"seqtx\"\n", toupper(roff(name)), version
    printf ".SH NAME\n%s \\- %s\n", roff(name), roff(title)
    printf ".SH SYNOPSIS\n.B %s\n%s\n", roff(name), roff(usage)
    print ".SH DESCRIPTION"
    text(about)
}

NR == 1 {
    sub(/^usage: [^ ]+ /, "")
    usage = $0
    next
}
/^  option / {
    description()
    print ".SH OPTIONS\nDefaults are in brackets."
    meaning_at = index($0, "meaning")
    next
}
/^$/ {
    blank = 1
    next
}
!meaning_at {
    about = about (about == "" ? "" : " ") $0
    next
}
/^[A-Z]/ && blank { # group names are short, the last paragraph is long
    group = length($0) < 40 ? $0 : "Notes"
    blank = 0
    if (group == "Presets" || group == "Notes") print ".SH " toupper(group)
    else print ".SS " roff(group)
    if (group != "Notes") next
}
group == "Presets" && /^  [^ ]/ {
    split($0, word, " ")
    item(word[1], "")
    text(substr($0, length(word[1]) + 3))
    next
}
/^  -/ {
    match($0, /^  (-[a-z], )*--[a-z0-9-]+/)
    option = substr($0, 3, RLENGTH - 2)
    meaning = substr($0, RLENGTH + 1)
    takes = ""
    if (match(meaning, /^ \[?[A-Z]+\]?/)) {      # one blank before the kind of value
        takes = " \\fI" roff(substr(meaning, 2, RLENGTH - 1)) "\\fR"
        meaning = substr(meaning, RLENGTH + 1)
    }
    item(option, takes)
    if (meaning ~ /[^ ]/) text(meaning)
    next
}
{ text($0) }
END { print ".SH SEE ALSO\n.BR seqtx (7)" }
