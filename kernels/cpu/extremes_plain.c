/* extremes_plain.c -- extremes of f64 and whole numbers, for extremes.c: one set of loops a type. */
#include <string.h>

#include "extremes.h"

enum { WIDTH = 1024 };

typedef struct plain {
    plan p;
    bool least;
    int64_t *ids;   /* NULL: only values; p.y NULL: only places */
    void *part;     /* [PARTS] of T, of one long line */
    int64_t *where; /* [PARTS] */
} plain;

#define T double
#define NAME(x) f64_##x
#define IS_NAN(v) ((v) != (v))
#include "extremes_plain.h"
#undef T
#undef NAME
#undef IS_NAN
#define IS_NAN(v) false /* of whole numbers */
#define T int64_t
#define NAME(x) i64_##x
#include "extremes_plain.h"
#undef T
#undef NAME
#define T int32_t
#define NAME(x) i32_##x
#include "extremes_plain.h"
#undef T
#undef NAME
#define T uint8_t
#define NAME(x) u8_##x
#include "extremes_plain.h"
#undef T
#undef NAME

void cpu_extremes_plain(const plan *p, bool least, int64_t *ids) {
    plain all = {.p = *p, .least = least, .ids = ids};
    if (p->d == DDP_F64) f64_extremes(&all);
    else if (p->d == DDP_I64) i64_extremes(&all);
    else if (p->d == DDP_I32) i32_extremes(&all);
    else u8_extremes(&all); /* and bool */
}
