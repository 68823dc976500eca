/* form_other.c - the second translation unit of the programs that form.sh compiles. It
   uses the header. With FORM_ONLY_IMPLEMENT it also contains the implementation for
   both units. With SEQTX_STATIC and SEQTX_IMPLEMENTATION on the command line, it
   contains a private implementation. */
#ifdef FORM_ONLY_IMPLEMENT
  #define SEQTX_IMPLEMENTATION
  #include FORM_HEADER
#else
  #include FORM_HEADER
#endif

#ifdef __cplusplus
extern "C" {
#endif
int form_other(void);
#ifdef __cplusplus
}
#endif

int form_other(void) {
    stx_ctx *x = stx_create(0);
    int bad = !stx_ok(x);
    (void)FORM_CALL(0);
    stx_destroy(x);
    return bad;
}
