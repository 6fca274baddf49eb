/* The chain of chain.py in C: keys at every unit boundary, one call per prompt or event.
 *
 * Optional: chain.py does the same without it, ten times slower. XXH3-64 with a seed is written out
 * here for inputs of 4 to 64 bytes (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md): a unit of 1 to
 * 16 tokens needs no more.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "written for little-endian machines; kvindexd works without this module"
#endif

typedef unsigned __int128 u128;

static const unsigned char SECRET[64] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
};

static uint64_t r64(const unsigned char *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

static uint32_t r32(const unsigned char *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

static uint64_t fold(uint64_t a, uint64_t b) {
    u128 product = (u128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t h) {
    h ^= h >> 37;
    h *= 0x165667919E3779F9ULL;
    return h ^ (h >> 32);
}

static uint64_t rotl(uint64_t v, int by) { return (v << by) | (v >> (64 - by)); }

static uint64_t mix16(const unsigned char *in, const unsigned char *secret, uint64_t seed) {
    return fold(r64(in) ^ (r64(secret) + seed), r64(in + 8) ^ (r64(secret + 8) - seed));
}

static uint64_t xxh3(const unsigned char *in, size_t len, uint64_t seed) {
    if (len <= 8) {
        seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
        uint64_t flip = (r64(SECRET + 8) ^ r64(SECRET + 16)) - seed;
        uint64_t h = (r32(in + len - 4) + ((uint64_t)r32(in) << 32)) ^ flip;
        h ^= rotl(h, 49) ^ rotl(h, 24);
        h *= 0x9FB21C651E98DF25ULL;
        h ^= (h >> 35) + len;
        h *= 0x9FB21C651E98DF25ULL;
        return h ^ (h >> 28);
    }
    if (len <= 16) {
        uint64_t lo = r64(in) ^ ((r64(SECRET + 24) ^ r64(SECRET + 32)) + seed);
        uint64_t hi = r64(in + len - 8) ^ ((r64(SECRET + 40) ^ r64(SECRET + 48)) - seed);
        return avalanche(len + __builtin_bswap64(lo) + hi + fold(lo, hi));
    }
    uint64_t acc = len * 0x9E3779B185EBCA87ULL;
    if (len > 32) {
        acc += mix16(in + 16, SECRET + 32, seed);
        acc += mix16(in + len - 32, SECRET + 48, seed);
    }
    acc += mix16(in, SECRET, seed);
    acc += mix16(in + len - 16, SECRET + 16, seed);
    return avalanche(acc);
}

PyDoc_STRVAR(extend_doc,
             "extend(key, tokens, unit) -> bytes\n\n"
             "Keys at every unit boundary behind `key`, packed uint64 LE; `tokens`: packed uint32\n"
             "LE, of which a trailing partial unit is dropped. Raises ValueError for a unit outside\n"
             "1..16.");

static PyObject *extend(PyObject *module, PyObject *args) {
    unsigned long long key;
    Py_buffer tokens;
    Py_ssize_t unit;
    (void)module;
    if (!PyArg_ParseTuple(args, "Ky*n", &key, &tokens, &unit)) return NULL;
    if (unit < 1 || unit > 16) {
        PyBuffer_Release(&tokens);
        return PyErr_Format(PyExc_ValueError, "unit: %zd tokens, expected 1 to 16", unit);
    }
    size_t step = (size_t)unit * 4;
    Py_ssize_t count = tokens.len / (Py_ssize_t)step;
    PyObject *out = PyBytes_FromStringAndSize(NULL, count * 8);
    if (out != NULL) {
        unsigned char *to = (unsigned char *)PyBytes_AS_STRING(out);
        const unsigned char *from = tokens.buf;
        uint64_t h = key;
        for (Py_ssize_t i = 0; i < count; i++, from += step, to += 8) {
            h = xxh3(from, step, h);
            memcpy(to, &h, 8);
        }
    }
    PyBuffer_Release(&tokens);
    return out;
}

static PyMethodDef methods[] = {{"extend", extend, METH_VARARGS, extend_doc}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_chain", NULL, 0, methods,
                                    NULL,                  NULL,     NULL, NULL};

PyMODINIT_FUNC PyInit__chain(void) { return PyModule_Create(&module); }
