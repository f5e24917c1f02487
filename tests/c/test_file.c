/* test_file.c -- files of tensors: what is written comes back, and damaged headers are refused (K4). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ddp.h"

static int failed;
static char path[64];

static void expect(int good, const char *name, const char *why) {
    if (good) printf("ok %s\n", name);
    else printf("not ok %s: %s\n", name, why ? why : "");
    failed |= !good;
}

static void write_bytes(const void *p, size_t n) {
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(p, 1, n, f) != n || fclose(f) != 0) abort();
}

/* A file with this header, and `data` bytes 0, 1, 0, 1 ... behind it. */
static void write_header(const char *json, size_t n, size_t data) {
    char *all = malloc(8 + n + data);
    for (int i = 0; i < 8; i++) all[i] = (char)((unsigned long long)n >> 8 * i);
    memcpy(all + 8, json, n);
    for (size_t i = 0; i < data; i++) all[8 + n + i] = (char)(i & 1);
    write_bytes(all, 8 + n + data);
    free(all);
}

/* Opens the file and touches everything in it: the status; the text of an error in *why. */
static int read_all(const char **why) {
    ddp_file *f = NULL;
    int st = ddp_file_open(path, &f);
    for (int i = 0; st == 0 && i < ddp_file_len(f); i++) {
        ddp_file_entry e;
        if (ddp_file_at(f, i, &e) < 0 || ddp_file_find(f, e.name) != i) abort();
        ddp_tensor *t = ddp_file_tensor(f, i);
        double *v = malloc(sizeof(double) * (size_t)(ddp_numel(t) + 1));
        if (t) ddp_to_doubles(t, v);
        free(v);
        ddp_release(t);
    }
    ddp_file_free(f);
    return ddp_error_take(why);
}

/* ---- round trips -------------------------------------------------------------------------------------------------- */

static void every_dtype(void) {
    const char *names[DDP_DTYPES];
    char text[DDP_DTYPES][16];
    ddp_tensor *made[DDP_DTYPES];
    int good = 1;
    for (int d = 0; d < DDP_DTYPES; d++) {
        ddp_tensor *r = ddp_randint(0, 2, 3, (int64_t[]){3, 5, 2}, DDP_I64, DDP_CPU), *c = ddp_cast(r, d);
        made[d] = ddp_permute(c, 3, (int64_t[]){2, 0, 1}); /* not row-major */
        snprintf(text[d], sizeof text[d], "t.%s", ddp_dtype_name(d));
        names[d] = text[d];
        ddp_release(r);
        ddp_release(c);
    }
    ddp_file *f = NULL;
    good &= ddp_file_write(path, DDP_DTYPES, names, made, 0, NULL, NULL) == 0 && ddp_file_open(path, &f) == 0;
    for (int d = 0; d < DDP_DTYPES && good; d++) {
        int i = ddp_file_find(f, names[d]);
        ddp_tensor *got = ddp_file_tensor(f, i), *into = ddp_full(3, (int64_t[]){2, 3, 5}, 0, d, DDP_CPU);
        double a[30], b[30], c[30];
        good &= got && ddp_dtype_of(got) == d && ddp_size(got, 0) == 2 && ddp_size(got, 1) == 3;
        good &= ddp_file_read(f, i, into) == 0 && ddp_to_doubles(made[d], a) == 0 && ddp_to_doubles(got, b) == 0;
        good &= ddp_to_doubles(into, c) == 0 && memcmp(a, b, sizeof a) == 0 && memcmp(a, c, sizeof a) == 0;
        ddp_release(got);
        ddp_release(into);
    }
    ddp_file_free(f);
    const char *why;
    ddp_error_take(&why);
    expect(good, "K3 tensors of every dtype and any strides come back as they were", why);
    for (int d = 0; d < DDP_DTYPES; d++) ddp_release(made[d]);
}

static void names_and_sizes(void) {
    const char *names[] = {"quote \" and \\", "tab\tnewline\n", "\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80", "empty",
                           "number"};
    const char *keys[] = {"a", "b"}, *texts[] = {"", "{\"x\": [1, 2]}\n"};
    ddp_tensor *t[] = {ddp_arange(0, 3, 1, DDP_F32, DDP_CPU), ddp_arange(0, 300, 1, DDP_U8, DDP_CPU),
                       ddp_arange(0, 2, 1, DDP_I64, DDP_CPU), ddp_full(2, (int64_t[]){0, 7}, 0, DDP_F64, DDP_CPU),
                       ddp_full(0, NULL, 5, DDP_F32, DDP_CPU)};
    ddp_file *f = NULL;
    int good =
        ddp_file_write(path, 5, names, t, 2, keys, texts) == 0 && ddp_file_open(path, &f) == 0 && ddp_file_len(f) == 5;
    ddp_tensor *kept = NULL;
    for (int i = 0; i < 5 && good; i++) {
        ddp_file_entry e;
        good &= ddp_file_at(f, ddp_file_find(f, names[i]), &e) == 0 && strcmp(e.name, names[i]) == 0;
        good &= e.dtype == ddp_dtype_of(t[i]) && e.ndim == ddp_ndim(t[i]) && e.size[0] == ddp_size(t[i], 0);
    }
    good = good && strcmp(ddp_file_text(f, "b"), texts[1]) == 0 && strcmp(ddp_file_text(f, "a"), "") == 0;
    good = good && !ddp_file_text(f, "c") && ddp_file_find(f, "absent") == -1;
    if (good) kept = ddp_file_tensor(f, ddp_file_find(f, "tab\tnewline\n"));
    ddp_file_free(f);
    double v[300] = {0};
    good = good && ddp_fill_(kept, 3) == 0 && ddp_to_doubles(kept, v) == 0 && v[0] == 3 && v[299] == 3;
    ddp_release(kept);
    good = good && ddp_file_open(path, &f) == 0 && (kept = ddp_file_tensor(f, ddp_file_find(f, names[1]))) != NULL;
    good = good && ddp_to_doubles(kept, v) == 0 && v[0] == 0 && v[255] == 255;
    ddp_release(kept);
    if (good) ddp_file_free(f);
    expect(good, "K3 names, texts and sizes come back; a tensor outlives its file and writes to it stay with it", NULL);
    const char *two[] = {"x", "x"}, *wrong[] = {"\xff", "y"}, *why;
    expect(ddp_file_write(path, 2, two, t, 0, NULL, NULL) == DDP_EINVAL && ddp_error_take(&why) &&
               strstr(why, "called \"x\""),
           "save: a name given twice is refused", NULL);
    expect(ddp_file_write(path, 2, wrong, t, 0, NULL, NULL) == DDP_EINVAL && ddp_error_take(&why) &&
               strstr(why, "UTF-8"),
           "save: a name that is not UTF-8 is refused", NULL);
    for (int i = 0; i < 5; i++) ddp_release(t[i]);
}

/* ---- damaged headers ------------------------------------------------------------------------------------------------ */

static const struct {
    const char *what, *json;
    size_t data;
    const char *error; /* NULL: the file is fine */
} CASES[] = {
    {"a header with space and escapes is read",
     " {\"\\u00e4\\/\\ud83d\\ude00\" : {\"shape\":[ 2 , 1 ],\n\"data_offsets\":[0,8],\"dtype\":\"F32\"}}  ", 8, NULL},
    {"a file without tensors is read", "{}", 0, NULL},
    {"a scalar and an empty tensor are read",
     "{\"a\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_"
     "offsets\":[8,8]}}",
     8, NULL},
    {"K4 overlapping offsets are refused",
     "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_"
     "offsets\":[2,6]}}",
     6, "offsets 2 to 6"},
    {"K4 two tensors in one place are refused",
     "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_"
     "offsets\":[0,4]}}",
     4, "offsets 0 to 4"},
    {"K4 a gap is refused", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}", 8, "offsets 4 to 8"},
    {"K4 offsets beyond the file are refused", "{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}", 7,
     "the data at 7"},
    {"K4 offsets that run backwards are refused",
     "{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_"
     "offsets\":[4,0]}}",
     4, "offsets 4 to 0"},
    {"K4 bytes that belong to no tensor are refused", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
     5, "end at byte 4 of 5"},
    {"K4 offsets of 2^64 are refused",
     "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,18446744073709551620]}}", 4, "too large"},
    {"K4 offsets of 2^63 are refused",
     "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[9223372036854775807,9223372036854775808]}}", 4,
     "too large"},
    {"K4 a shape whose product is 2^64 + 4 is refused",
     "{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0, "has 0 bytes"},
    {"K4 a shape whose bytes overflow is refused",
     "{\"a\":{\"dtype\":\"F64\",\"shape\":[2305843009213693953],\"data_offsets\":[0,8]}}", 8, "has 8 bytes"},
    {"K4 an empty tensor of huge sizes is refused",
     "{\"a\":{\"dtype\":\"U8\",\"shape\":[0,4611686018427387904,4],\"data_offsets\":[0,0]}}", 0, "has 0 bytes"},
    {"K4 another number of bytes than the shape has is refused",
     "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,7]}}", 7, "F32 [2] but has 7 bytes"},
    {"K4 an unknown dtype is refused", "{\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4,
     "a dtype other than"},
    {"K4 a name that stands there twice is refused",
     "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_"
     "offsets\":[1,2]}}",
     2, "\"a\" stands there twice"},
    {"K4 names alike but for an escape are refused",
     "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"\\u0061\":{\"dtype\":\"U8\",\"shape\":[1],"
     "\"data_offsets\":[1,2]}}",
     2, "twice"},
    {"K4 __metadata__ twice is refused", "{\"__metadata__\":{},\"__metadata__\":{}}", 0, "twice"},
    {"K4 a metadata key twice is refused", "{\"__metadata__\":{\"x\":\"1\",\"x\":\"2\"}}", 0,
     "\"x\" stands there twice"},
    {"K4 metadata that is no text is refused", "{\"__metadata__\":{\"x\":1}}", 0, "a string expected"},
    {"K4 a key twice in a tensor is refused",
     "{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "a key twice"},
    {"K4 a tensor without a shape is refused", "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1,
     "without dtype, shape"},
    {"K4 a tensor with an unknown key is refused",
     "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":0}}", 1, "a key other than"},
    {"K4 nine dims are refused", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1,
     "more than 8 dims"},
    {"K4 a depth that the format has not is refused",
     "{\"a\":{\"dtype\":\"U8\",\"shape\":[[1]],\"data_offsets\":[0,1]}}", 1, "a whole number"},
    {"K4 a negative size is refused", "{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}", 1,
     "a whole number"},
    {"K4 a fraction is refused", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1.0],\"data_offsets\":[0,1]}}", 1, "expected"},
    {"K4 a leading zero is refused", "{\"a\":{\"dtype\":\"U8\",\"shape\":[01],\"data_offsets\":[0,1]}}", 1,
     "a whole number"},
    {"K4 three offsets are refused", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,1]}}", 1,
     "two offsets"},
    {"K4 one offset is refused", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1,
     "two data_offsets"},
    {"K4 a comma too many is refused", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},}", 1,
     "a string expected"},
    {"K4 half a surrogate pair is refused", "{\"\\ud83d\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
     "surrogate"},
    {"K4 a zero byte in a name is refused", "{\"\\u0000\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
     "zero byte"},
    {"K4 bytes that are not UTF-8 are refused",
     "{\"\xc0\x80\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "UTF-8"},
    {"K4 a bare control character is refused", "{\"a\nb\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
     "UTF-8"},
    {"K4 an unknown escape is refused", "{\"\\x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
     "unknown escape"},
    {"K4 more after the end is refused", "{} {}", 0, "more after its end"},
    {"K4 an array is refused", "[]", 0, "expected"},
    {"K4 a BOOL that is neither 0 nor 1 is refused",
     "{\"a\":{\"dtype\":\"BOOL\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, NULL},
};

static void known_cases(void) {
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        const char *why;
        int st;
        write_header(CASES[i].json, strlen(CASES[i].json), CASES[i].data);
        if (strstr(CASES[i].what, "BOOL")) {
            FILE *f = fopen(path, "r+b");
            fseek(f, -1, SEEK_END);
            fputc(2, f);
            fclose(f);
            st = read_all(&why);
            expect(st == DDP_EIO && strstr(why, "byte of 2"), CASES[i].what, why);
            continue;
        }
        st = read_all(&why);
        expect(CASES[i].error ? st == DDP_EIO && strstr(why, CASES[i].error) : st == 0, CASES[i].what, why);
    }
    static const struct {
        const char *what, *bytes;
        size_t n;
    } short_files[] = {{"K4 an empty file is refused", "", 0},
                       {"K4 a file of seven bytes is refused", "\2\0\0\0\0\0\0", 7},
                       {"K4 a header longer than the file is refused", "\3\0\0\0\0\0\0\0{}", 10},
                       {"K4 a header of 2^64 - 1 bytes is refused", "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10}};
    for (size_t i = 0; i < 4; i++) {
        const char *why;
        write_bytes(short_files[i].bytes, short_files[i].n);
        expect(read_all(&why) == DDP_EIO, short_files[i].what, why);
    }
}

static unsigned long long state = 20240229; /* the seed of the mutations */
static unsigned next(unsigned n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(state >> 33) % n;
}

/* A header of eight tensors in a row; its length. Their bytes in *data. */
static size_t plain_header(char *out, size_t room, size_t *data) {
    static const char *const dtype[] = {"F64", "I64", "F32", "I32", "F16", "BF16", "U8", "BOOL"};
    static const int width[] = {8, 8, 4, 4, 2, 2, 1, 1};
    size_t n = 0, at = 0;
    for (int i = 0; i < 8; i++) {
        int a = 1 + i % 3, b = 2 + i;
        n += (size_t)snprintf(out + n, room - n,
                              "%c\"layer.%d\":{\"dtype\":\"%s\",\"shape\":[%d,%d],\"data_offsets\":[%zu,%zu]}",
                              i ? ',' : '{', i, dtype[i], a, b, at, at + (size_t)(a * b * width[i]));
        at += (size_t)(a * b * width[i]);
    }
    n += (size_t)snprintf(out + n, room - n, "}");
    *data = at;
    return n;
}

/* One change after which the header cannot be right: a digit becomes another one, a character of its frame goes or becomes
 * another one, a part is cut off or repeated. The new length. */
static size_t damage(char *h, size_t n) {
    for (;;) {
        size_t i = next((unsigned)n);
        int named = h[i] >= '0' && h[i] <= '9' && i > 6 && strncmp(h + i - 6, "layer.", 6) == 0;
        switch (next(5)) {
            case 0: /* a digit of a number, not of a name or dtype: all numbers depend on each other */
                if (h[i] < '0' || h[i] > '9' || named || h[i - 1] == 'F' || h[i - 1] == 'I' || h[i - 1] == 'U' ||
                    (h[i - 2] == 'F') || (h[i - 2] == 'I'))
                    continue;
                h[i] = (char)('0' + (h[i] - '0' + 1 + (int)next(9)) % 10);
                return n;
            case 1: /* a character of the frame goes */
                if (!strchr("{}[]\":,", h[i])) continue;
                memmove(h + i, h + i + 1, n - i - 1);
                return n - 1;
            case 2: /* becomes a letter */
                if (!strchr("{}[]:,", h[i])) continue;
                h[i] = (char)('a' + next(26));
                return n;
            case 3: return next((unsigned)n); /* cut off */
            default: {                        /* a stretch repeated, at least one character of the frame */
                size_t len = 1 + next(40);
                if (i + len > n || !memchr(h + i, '{', len)) continue;
                memmove(h + i + len, h + i, n - i);
                return n + len;
            }
        }
    }
}

static void mutations(void) {
    char plain[2048], h[4096], name[200];
    size_t data, n = plain_header(plain, sizeof plain, &data);
    const char *why;
    write_header(plain, n, data);
    int fine = read_all(&why) == 0, refused = 0;
    snprintf(name, sizeof name, "not refused: ");
    for (int i = 0; i < 1000; i++) {
        memcpy(h, plain, n);
        size_t m = damage(h, n);
        write_header(h, m, data);
        if (read_all(&why) < 0) refused++;
        else snprintf(name, sizeof name, "mutation %d: %.150s", i, h);
    }
    expect(fine && refused == 1000, "K4 1,000 damaged headers are an error each time", name);
    int ended = 0;
    for (int i = 0; i < 1000; i++) { /* any bytes at all: no crash, whatever comes out */
        memcpy(h, plain, n);
        for (unsigned k = 1 + next(6); k > 0; k--) h[next((unsigned)n)] = (char)next(256);
        write_header(h, n, data);
        read_all(&why);
        ended++;
    }
    expect(ended == 1000, "K4 1,000 headers with random bytes end in an error or in tensors inside the file", NULL);
}

int main(void) {
    snprintf(path, sizeof path, "/tmp/ddp-test-file-%d.safetensors", (int)getpid());
    every_dtype();
    names_and_sizes();
    known_cases();
    mutations();
    unlink(path);
    return failed;
}
