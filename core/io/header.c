/* header.c -- reads the header of a safetensors file: one JSON object of known form, so that no recursion is needed.
 * Nothing in it is believed before all of it is checked. */
#include <stdlib.h>
#include <string.h>

#include "io.h"

const char *const ddp__file_dtype[DDP_DTYPES] = {"F32", "F64", "F16", "BF16", "I64", "I32", "U8", "BOOL"};

typedef struct reader {
    ddp_file *f;
    const char *from, *at, *end;
    char *out; /* where the next string goes, in f->strings */
} reader;

static int bad(const reader *r, const char *why) {
    return ddp__fail(DDP_EIO, "load: %s: its header is damaged at byte %lld: %s", r->f->path,
                     (long long)(r->at - r->from), why);
}

/* ---- JSON ----------------------------------------------------------------------------------------------------- */

size_t ddp__utf8(const char *text, const char *end) {
    const unsigned char *s = (const unsigned char *)text;
    size_t left = (size_t)(end - text), n = s[0] < 0x80 ? 1 : s[0] < 0xc2 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
    if (n == 0 || s[0] > 0xf4 || n > left) return 0;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    /* overlong, surrogates, above U+10FFFF */
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f)) return 0;
    if ((s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] > 0x8f)) return 0;
    return n;
}

static void skip_space(reader *r) {
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\n' || *r->at == '\r' || *r->at == '\t')) r->at++;
}

/* Is c the next character but space? Then it is taken. */
static bool take(reader *r, char c) {
    skip_space(r);
    if (r->at >= r->end || *r->at != c) return false;
    r->at++;
    return true;
}

static int need(reader *r, char c) {
    static const char *const what[] = {"\"{\" expected", "\"}\" or \",\" expected", "\":\" expected", "\"[\" expected",
                                       "\"]\" or \",\" expected"};
    if (take(r, c)) return 0;
    return bad(r, c == '{' ? what[0] : c == '}' ? what[1] : c == ':' ? what[2] : c == '[' ? what[3] : what[4]);
}

static int hex4(reader *r, uint32_t *out) {
    *out = 0;
    for (int i = 0; i < 4; i++, r->at++) {
        char c = r->at < r->end ? *r->at : 0;
        uint32_t digit = c >= '0' && c <= '9'   ? (uint32_t)(c - '0')
                         : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a' + 10)
                         : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A' + 10)
                                                : 16;
        if (digit > 15) return bad(r, "four hexadecimal digits expected after \\u");
        *out = *out * 16 + digit;
    }
    return 0;
}

/* What follows \u, as UTF-8. A character of the file's takes at least as many bytes as what it stands for. */
static int code_point(reader *r) {
    uint32_t c, low;
    int st = hex4(r, &c);
    if (st < 0) return st;
    if (c >= 0xd800 && c < 0xdc00) {
        if (r->end - r->at < 2 || r->at[0] != '\\' || r->at[1] != 'u') return bad(r, "half of a surrogate pair");
        r->at += 2;
        if ((st = hex4(r, &low)) < 0) return st;
        if (low < 0xdc00 || low > 0xdfff) return bad(r, "half of a surrogate pair");
        c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
    } else if (c >= 0xdc00 && c <= 0xdfff) {
        return bad(r, "half of a surrogate pair");
    }
    if (c == 0) return bad(r, "a text with a zero byte");
    if (c < 0x80) {
        *r->out++ = (char)c;
    } else {
        int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
        static const uint32_t lead[] = {0, 0xc0, 0xe0, 0xf0};
        *r->out++ = (char)(lead[more] | c >> 6 * more);
        while (more-- > 0) *r->out++ = (char)(0x80 | (c >> 6 * more & 0x3f));
    }
    return 0;
}

/* A string, decoded into f->strings and ended by a zero. */
static int string(reader *r, const char **out) {
    static const char escapes[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    if (!take(r, '"')) return bad(r, "a string expected");
    *out = r->out;
    while (r->at < r->end && *r->at != '"') {
        size_t n = ddp__utf8(r->at, r->end);
        if (n == 0 || (unsigned char)*r->at < 0x20) return bad(r, "a string that is not UTF-8");
        if (*r->at != '\\') {
            memcpy(r->out, r->at, n);
            r->out += n;
            r->at += n;
            continue;
        }
        if (++r->at >= r->end) break;
        char c = *r->at++;
        const char *known = c ? strchr(escapes, c) : NULL;
        if (known) *r->out++ = meant[known - escapes];
        else if (c != 'u') return bad(r, "an unknown escape");
        else if (code_point(r) < 0) return ddp__pending();
    }
    if (r->at >= r->end) return bad(r, "a string without an end");
    r->at++;
    *r->out++ = 0;
    return 0;
}

/* A whole number from 0, without sign, leading zeros, fraction or exponent. */
static int whole(reader *r, uint64_t *out) {
    skip_space(r);
    const char *from = r->at;
    uint64_t v = 0;
    for (; r->at < r->end && *r->at >= '0' && *r->at <= '9'; r->at++) {
        uint64_t digit = (uint64_t)(*r->at - '0');
        if (v > (INT64_MAX - digit) / 10) return bad(r, "a number that is too large");
        v = v * 10 + digit;
    }
    if (r->at == from || (*from == '0' && r->at - from > 1)) return bad(r, "a whole number from 0 expected");
    *out = v;
    return 0;
}

/* [a, b, ...], at most `most` numbers. */
static int numbers(reader *r, uint64_t *out, int most, int *n) {
    int st = need(r, '[');
    *n = 0;
    if (st < 0 || take(r, ']')) return st;
    do {
        if (*n == most) return bad(r, most == 2 ? "two offsets expected" : "a shape of more than 8 dims");
        if ((st = whole(r, &out[(*n)++])) < 0) return st;
    } while (take(r, ','));
    return need(r, ']');
}

/* ---- what the header says --------------------------------------------------------------------------------------- */

/* Room for one more of `size` bytes in *list, which has n. */
static void *grown(void *list, int n, size_t size) {
    if (n & (n - 1)) return list;
    return realloc(list, (n ? (size_t)n * 2 : 1) * size);
}

static int metadata(reader *r) {
    ddp_file *f = r->f;
    int st = need(r, '{');
    if (st < 0 || take(r, '}')) return st;
    do {
        ddp_file_text_pair *text = grown(f->text, f->n_texts, sizeof *text);
        if (!text) return ddp__fail(DDP_ENOMEM, "load: %s: out of memory for its header", f->path);
        f->text = text;
        ddp_file_text_pair *p = &text[f->n_texts];
        if ((st = string(r, &p->key)) < 0 || (st = need(r, ':')) < 0 || (st = string(r, &p->text)) < 0) return st;
        f->n_texts++;
    } while (take(r, ','));
    return need(r, '}');
}

static int dtype_of(reader *r, int *out) {
    const char *name = "";
    int st = string(r, &name);
    for (int d = 0; st == 0 && d < DDP_DTYPES; d++)
        if (strcmp(name, ddp__file_dtype[d]) == 0) {
            *out = d;
            return 0;
        }
    return st < 0 ? st : bad(r, "a dtype other than F32 F64 F16 BF16 I64 I32 U8 BOOL");
}

/* {"dtype": ..., "shape": ..., "data_offsets": ...} in any order. */
static int tensor(reader *r, struct ddp_file_item *item) {
    static const char *const keys[] = {"dtype", "shape", "data_offsets"};
    uint64_t size[DDP_MAX_DIM] = {0}, offset[2] = {0};
    int seen = 0, n = 0, st = need(r, '{');
    if (st < 0) return st;
    do {
        const char *key = "";
        if ((st = string(r, &key)) < 0 || (st = need(r, ':')) < 0) return st;
        int k = 0;
        while (k < 3 && strcmp(key, keys[k]) != 0) k++;
        if (k == 3) return bad(r, "a tensor has a key other than dtype, shape and data_offsets");
        if (seen & 1 << k) return bad(r, "a tensor has a key twice");
        seen |= 1 << k;
        st = k == 0   ? dtype_of(r, &item->e.dtype)
             : k == 1 ? numbers(r, size, DDP_MAX_DIM, &item->e.ndim)
                      : numbers(r, offset, 2, &n);
        if (st < 0) return st;
    } while (take(r, ','));
    if ((st = need(r, '}')) < 0) return st;
    if (seen != 7 || n != 2) return bad(r, "a tensor without dtype, shape or two data_offsets");
    for (int d = 0; d < item->e.ndim; d++) item->e.size[d] = (int64_t)size[d];
    item->begin = offset[0];
    item->end = offset[1];
    return 0;
}

static int parse(reader *r) {
    ddp_file *f = r->f;
    bool told = false;
    int st = need(r, '{');
    if (st < 0) return st;
    if (!take(r, '}')) {
        do {
            struct ddp_file_item *item = grown(f->item, f->n, sizeof *item);
            if (!item) return ddp__fail(DDP_ENOMEM, "load: %s: out of memory for its header", f->path);
            f->item = item;
            item = &item[f->n];
            *item = (struct ddp_file_item){0};
            if ((st = string(r, &item->e.name)) < 0 || (st = need(r, ':')) < 0) return st;
            if (strcmp(item->e.name, "__metadata__") == 0) {
                if (told) return bad(r, "__metadata__ twice");
                told = true;
                st = metadata(r);
            } else {
                st = tensor(r, item);
                f->n++;
            }
            if (st < 0) return st;
        } while (take(r, ','));
        if ((st = need(r, '}')) < 0) return st;
    }
    skip_space(r);
    return r->at == r->end ? 0 : bad(r, "more after its end");
}

/* ---- does it hold together? ---------------------------------------------------------------------------------------- */

static int by_place(const void *a, const void *b) {
    const struct ddp_file_item *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}
static int by_name(const void *a, const void *b) {
    return strcmp(((const struct ddp_file_item *)a)->e.name, ((const struct ddp_file_item *)b)->e.name);
}
static int by_key(const void *a, const void *b) {
    return strcmp(((const ddp_file_text_pair *)a)->key, ((const ddp_file_text_pair *)b)->key);
}

/* Bytes of a tensor by its dtype and shape; false when they are more than a number holds, also where one of its sizes is 0. */
static bool bytes_of(const ddp_file_entry *e, uint64_t *out) {
    uint64_t n = ddp__dtype_bytes[e->dtype];
    bool empty = false;
    for (int d = 0; d < e->ndim; d++) {
        empty |= e->size[d] == 0;
        if (e->size[d] > 0 && (__builtin_mul_overflow(n, (uint64_t)e->size[d], &n) || n > INT64_MAX)) return false;
    }
    *out = empty ? 0 : n;
    return true;
}

static int check(ddp_file *f, uint64_t data_bytes) {
    uint64_t at = 0, want;
    if (f->n > 1) qsort(f->item, (size_t)f->n, sizeof *f->item, by_place);
    for (int i = 0; i < f->n; i++) {
        const struct ddp_file_item *x = &f->item[i];
        if (x->begin != at || x->end < x->begin || x->end > data_bytes)
            return ddp__fail(
                DDP_EIO,
                "load: %s: tensor \"%.100s\" has the offsets %llu to %llu; the one before ends at %llu, the "
                "data at %llu",
                f->path, x->e.name, (unsigned long long)x->begin, (unsigned long long)x->end, (unsigned long long)at,
                (unsigned long long)data_bytes);
        if (!bytes_of(&x->e, &want) || want != x->end - x->begin)
            return ddp__fail(DDP_EIO, "load: %s: tensor \"%.100s\" is %s %s but has %llu bytes", f->path, x->e.name,
                             ddp__file_dtype[x->e.dtype], DDP_SHAPE_TEXT(&x->e),
                             (unsigned long long)(x->end - x->begin));
        at = x->end;
    }
    if (at != data_bytes)
        return ddp__fail(DDP_EIO, "load: %s: its tensors end at byte %llu of %llu of data", f->path,
                         (unsigned long long)at, (unsigned long long)data_bytes);
    if (f->n > 1) qsort(f->item, (size_t)f->n, sizeof *f->item, by_name);
    for (int i = 1; i < f->n; i++)
        if (by_name(&f->item[i - 1], &f->item[i]) == 0)
            return ddp__fail(DDP_EIO, "load: %s: tensor \"%.100s\" stands there twice", f->path, f->item[i].e.name);
    if (f->n_texts > 1) qsort(f->text, (size_t)f->n_texts, sizeof *f->text, by_key);
    for (int i = 1; i < f->n_texts; i++)
        if (by_key(&f->text[i - 1], &f->text[i]) == 0)
            return ddp__fail(DDP_EIO, "load: %s: metadata \"%.100s\" stands there twice", f->path, f->text[i].key);
    return 0;
}

int ddp__file_header(ddp_file *f, const char *json, size_t n, uint64_t data_bytes) {
    /* A decoded string with its zero is no longer than the string with its quotes. */
    if (!(f->strings = malloc(n + 1))) return ddp__fail(DDP_ENOMEM, "load: %s: out of memory for its header", f->path);
    reader r = {.f = f, .from = json, .at = json, .end = json + n, .out = f->strings};
    int st = parse(&r);
    return st < 0 ? st : check(f, data_bytes);
}
