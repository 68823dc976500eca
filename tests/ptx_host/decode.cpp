/* decode.cpp - from an opcode with modifiers to the form that describes it. The decoders
   of the instruction classes are next to the execution functions, in exec_*.cpp. */
#include "exec.h"
#include <algorithm>

namespace ptx {

// >>types

const type_row types[TYPES] = {
    /* name    bytes  signed float */
    {"",       0,     false, false},
    {"pred",   0,     false, false},
    {"b8",     1,     false, false},
    {"b16",    2,     false, false},
    {"b32",    4,     false, false},
    {"b64",    8,     false, false},
    {"u8",     1,     false, false},
    {"u16",    2,     false, false},
    {"u32",    4,     false, false},
    {"u64",    8,     false, false},
    {"s8",     1,     true,  false},
    {"s16",    2,     true,  false},
    {"s32",    4,     true,  false},
    {"s64",    8,     true,  false},
    {"f16",    2,     true,  true},
    {"bf16",   2,     true,  true},
    {"f16x2",  4,     true,  true},
    {"bf16x2", 4,     true,  true},
    {"tf32",   4,     true,  true},
    {"f32",    4,     true,  true},
    {"f64",    8,     true,  true},
};

const char *same_operands(type t, int sources) {
    static const char *h[] = {"H", "Hh", "Hhh", "Hhhh"};
    static const char *w[] = {"W", "Ww", "Www", "Wwww"};
    static const char *l[] = {"L", "Ll", "Lll", "Llll"};
    if (type_size(t) == 8) return l[sources];
    return type_size(t) == 4 ? w[sources] : h[sources];
}


// >>modifiers

bool opcode::take(const char *modifier) {
    auto found = std::find(modifiers.begin(), modifiers.end(), modifier);
    if (found == modifiers.end()) return false;
    modifiers.erase(found);
    return true;
}

type opcode::take_type() {
    for (auto m = modifiers.begin(); m != modifiers.end(); ++m) {
        for (int t = PRED; t < TYPES; t++) {
            if (*m != types[t].name) continue;
            modifiers.erase(m);
            return (type)t;
        }
    }
    return NO_TYPE;
}

ptx::rounding opcode::take_rounding() {
    static const std::pair<const char *, ptx::rounding> names[] = {
        {"rn", NEAREST_EVEN}, {"rz", TOWARD_ZERO}, {"rm", DOWN}, {"rp", UP}, {"rna", NEAREST_AWAY},
        {"rni", INTEGER_EVEN}, {"rzi", INTEGER_ZERO}, {"rmi", INTEGER_DOWN}, {"rpi", INTEGER_UP}};
    for (auto &n : names)
        if (take(n.first)) return n.second;
    return NO_ROUNDING;
}

ptx::space opcode::take_space() {
    static const std::pair<const char *, ptx::space> names[] = {
        {"global", GLOBAL}, {"shared", SHARED}, {"shared::cta", SHARED}, {"local", LOCAL},
        {"param", PARAM}, {"param::entry", PARAM}, {"param::func", PARAM}, {"const", CONST}};
    for (auto &n : names)
        if (take(n.first)) return n.second;
    return GENERIC;
}


// >>the table

static decoder *find_decoder(const std::string &name) {
    static const std::unordered_map<std::string, decoder *> table = {
        {"add", decode_arithmetic}, {"sub", decode_arithmetic}, {"mul", decode_arithmetic},
        {"mad", decode_arithmetic}, {"fma", decode_arithmetic}, {"div", decode_arithmetic},
        {"rem", decode_arithmetic}, {"min", decode_arithmetic}, {"max", decode_arithmetic},
        {"abs", decode_arithmetic}, {"neg", decode_arithmetic}, {"sad", decode_arithmetic},
        {"mul24", decode_arithmetic},

        {"and", decode_logic}, {"or", decode_logic}, {"xor", decode_logic},
        {"not", decode_logic}, {"cnot", decode_logic}, {"lop3", decode_logic},
        {"shl", decode_shift}, {"shr", decode_shift}, {"shf", decode_shift},
        {"popc", decode_bits}, {"clz", decode_bits}, {"bfind", decode_bits},
        {"brev", decode_bits}, {"bfe", decode_bits}, {"bfi", decode_bits},
        {"prmt", decode_bits},

        {"copysign", decode_float}, {"testp", decode_float}, {"rcp", decode_approximate},
        {"sqrt", decode_approximate}, {"rsqrt", decode_approximate},
        {"ex2", decode_approximate}, {"lg2", decode_approximate},
        {"sin", decode_approximate}, {"cos", decode_approximate},
        {"tanh", decode_approximate},

        {"cvt", decode_convert}, {"setp", decode_compare}, {"set", decode_compare},
        {"selp", decode_select}, {"slct", decode_select}, {"mov", decode_move},

        {"ld", decode_load}, {"ldu", decode_load}, {"st", decode_store},
        {"atom", decode_atomic}, {"red", decode_atomic}, {"cvta", decode_address},
        {"isspacep", decode_address}, {"cp", decode_copy}, {"prefetch", decode_copy},
        {"membar", decode_fence}, {"fence", decode_fence},

        {"bra", decode_control}, {"brx", decode_control}, {"call", decode_control},
        {"ret", decode_control}, {"exit", decode_control}, {"trap", decode_control},
        {"nanosleep", decode_control},
        {"bar", decode_barrier}, {"barrier", decode_barrier},
        {"shfl", decode_shuffle}, {"vote", decode_vote}, {"activemask", decode_vote},
        {"match", decode_match}, {"redux", decode_reduce},
        {"mma", decode_mma}, {"ldmatrix", decode_ldmatrix},
    };
    auto found = table.find(name);
    return found == table.end() ? nullptr : found->second;
}

static opcode split_opcode(const std::string &text) {
    opcode o;
    size_t dot = text.find('.');
    o.name = text.substr(0, dot);
    while (dot != std::string::npos) {
        size_t next = text.find('.', dot + 1);
        o.modifiers.push_back(text.substr(dot + 1, next - dot - 1));
        dot = next;
    }
    return o;
}

const form *find_form(const std::string &text) {
    static std::unordered_map<std::string, form> forms;
    auto found = forms.find(text);
    if (found != forms.end()) return &found->second;

    opcode o = split_opcode(text);
    decoder *decode = find_decoder(o.name);
    form f;
    f.text = text;
    if (!decode || !decode(o, f) || !o.modifiers.empty()) return nullptr;
    if (!f.run && f.control == NEXT) return nullptr;
    bool is_double = f.to == F64 || f.from == F64;
    if (o.name == "mov" || o.name == "cvta" || f.space == PARAM) f.counter = IN_MOVE;
    else if (f.counter == IN_ARITHMETIC && is_double && !f.selects) f.counter = IN_DOUBLE;
    return &(forms[text] = f);
}

} // namespace ptx
