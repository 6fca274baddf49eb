/* What nearly every stored block goes through, in C: holdings.store_all for blocks that nothing is
 * known of yet, and records.pack_all for blocks with one slot, no digest and no other name.
 *
 * Optional: holdings.py and records.py do the same without it, some three times slower, and do
 * everything else in any case.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "written for little-endian machines; kvindexd works without this module"
#endif

enum { MUTATION = 24, RECORD = 24, KEY = 0, LENGTH, NAME, PARENT, DIGEST, COPIES, FIELDS };

static const char *const NAMES[FIELDS] = {"key", "length", "name", "parent", "digest", "copies"};

/* Where an instance of the block type keeps each field; found once per type. */
static PyTypeObject *known;
static Py_ssize_t offsets[FIELDS];

static int learn(PyTypeObject *type) {
    if (type == known) return 0;
    for (int i = 0; i < FIELDS; i++) {
        PyObject *found = PyObject_GetAttrString((PyObject *)type, NAMES[i]);
        if (found == NULL) return -1;
        if (Py_TYPE(found) != &PyMemberDescr_Type) {
            PyErr_Format(PyExc_TypeError, "%s.%s: expected a slot", type->tp_name, NAMES[i]);
            Py_DECREF(found);
            return -1;
        }
        offsets[i] = ((PyMemberDescrObject *)found)->d_member->offset;
        Py_DECREF(found);
    }
    Py_INCREF(type);
    Py_XSETREF(known, type);
    return 0;
}

static PyObject *field(PyObject *block, int which) {
    return *(PyObject **)((char *)block + offsets[which]);
}

static uint64_t key_at(const unsigned char *keys, Py_ssize_t step, Py_ssize_t i) {
    uint64_t key;
    memcpy(&key, keys + ((i + 1) * step - 1) * 8, 8);
    return key;
}

/* Whether no hash is bound and no name is held, nor twice in this very event. The names, or NULL
 * with or without an error set. */
static PyObject *fresh_names(PyObject *blocks, PyObject *held, PyObject *hashes,
                             const unsigned char *keys, Py_ssize_t step) {
    Py_ssize_t count = PyList_GET_SIZE(hashes);
    PyObject *names = PyTuple_New(count), *seen = PySet_New(NULL);
    int ok = names != NULL && seen != NULL;
    for (Py_ssize_t i = 0; ok && i < count; i++) {
        PyObject *name = PyLong_FromUnsignedLongLong(key_at(keys, step, i));
        if (name == NULL) {
            ok = 0;
            break;
        }
        PyTuple_SET_ITEM(names, i, name);
        ok = PyDict_Contains(blocks, PyList_GET_ITEM(hashes, i)) == 0 &&
             PyDict_Contains(held, name) == 0 && PySet_Contains(seen, name) == 0 &&
             PySet_Add(seen, name) == 0;
    }
    Py_XDECREF(seen);
    if (!ok) Py_CLEAR(names);
    return names;
}

static int store_one(PyObject *const *args, PyObject *hash, PyObject *name, PyObject *parent,
                     long long length, PyObject *one) {
    PyObject *blocks = args[0], *held = args[1], *dirty = args[2], *type = args[10];
    PyObject *end = PyLong_FromLongLong(length);
    if (end == NULL) return -1;
    PyObject *values[FIELDS] = {name, end, name, parent, Py_None, one};
    PyObject *block = PyObject_Vectorcall(type, values, FIELDS, NULL);
    Py_DECREF(end);
    if (block == NULL) return -1;
    int bad = PyDict_SetItem(blocks, hash, block) < 0 || PyDict_SetItem(held, name, one) < 0 ||
              PySet_Add(dirty, hash) < 0;
    Py_DECREF(block);
    return bad ? -1 : 0;
}

static void tell(unsigned char *to, uint64_t name, uint64_t parent, uint32_t length, int plane,
                 int op) {
    memcpy(to, &name, 8);
    memcpy(to + 8, &parent, 8);
    memcpy(to + 16, &length, 4);
    to[20] = (unsigned char)plane;
    to[21] = (unsigned char)op;
    to[22] = to[23] = 0;
}

PyDoc_STRVAR(store_doc,
             "store(blocks, held, dirty, hashes, keys, step, start, size, slot, op, block)\n\n"
             "Bind each of `hashes` to a new block with one copy, if nothing is known of any of\n"
             "them; the packed mutations, or None (and nothing changed) otherwise.\n\n"
             "`keys`: packed uint64 of every unit, of which each `step`-th ends a block. `start`:\n"
             "(key, tokens) before the first block; `size`: tokens per block. `slot`: (copies as\n"
             "packed for one copy there, its plane).");

static PyObject *store(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (nargs != 11 || !PyDict_Check(args[0]) || !PyDict_Check(args[1]) || !PySet_Check(args[2]) ||
        !PyList_Check(args[3]) || !PyBytes_Check(args[4]) || !PyTuple_Check(args[6]) ||
        !PyTuple_Check(args[8]) || PyTuple_GET_SIZE(args[6]) != 2 ||
        PyTuple_GET_SIZE(args[8]) != 2) {
        PyErr_SetString(PyExc_TypeError, "store: see its documentation");
        return NULL;
    }
    Py_ssize_t step = PyLong_AsSsize_t(args[5]), size = PyLong_AsSsize_t(args[7]);
    PyObject *parent = PyTuple_GET_ITEM(args[6], 0), *one = PyTuple_GET_ITEM(args[8], 0);
    long long length = PyLong_AsLongLong(PyTuple_GET_ITEM(args[6], 1));
    uint64_t before = PyLong_AsUnsignedLongLong(parent);
    long plane = PyLong_AsLong(PyTuple_GET_ITEM(args[8], 1)), op = PyLong_AsLong(args[9]);
    if (PyErr_Occurred()) return NULL;
    Py_ssize_t count = PyList_GET_SIZE(args[3]);
    const unsigned char *keys = (const unsigned char *)PyBytes_AS_STRING(args[4]);
    if (step < 1 || size < 1 || PyBytes_GET_SIZE(args[4]) / 8 / step < count ||
        length < 0 || length > UINT32_MAX ||
        (count > 0 && size > (UINT32_MAX - length) / count)) {
        PyErr_SetString(PyExc_ValueError, "store: keys, step or lengths do not fit the hashes");
        return NULL;
    }
    PyObject *names = fresh_names(args[0], args[1], args[3], keys, step);
    if (names == NULL) {
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_NONE;
    }
    PyObject *told = PyBytes_FromStringAndSize(NULL, count * MUTATION);
    unsigned char *to = told != NULL ? (unsigned char *)PyBytes_AS_STRING(told) : NULL;
    for (Py_ssize_t i = 0; told != NULL && i < count; i++, to += MUTATION) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        length += size;
        if (store_one(args, PyList_GET_ITEM(args[3], i), name, parent, length, one) < 0) {
            Py_CLEAR(told);
            break;
        }
        uint64_t key = key_at(keys, step, i);
        tell(to, key, before, (uint32_t)length, (int)plane, (int)op);
        parent = name;
        before = key;
    }
    Py_DECREF(names);
    return told;
}

/* The record of a block that is as nearly all are; 0 when it is not, -1 with an error. */
static int record(PyObject *hash, PyObject *block, unsigned char *name, unsigned char *to) {
    PyObject *key = field(block, KEY), *copies = field(block, COPIES);
    if (!PyLong_CheckExact(hash) || field(block, DIGEST) != Py_None) return 0;
    if (field(block, NAME) != key) { /* equal numbers may still be two objects */
        int same = PyObject_RichCompareBool(field(block, NAME), key, Py_EQ);
        if (same <= 0) return same;
    }
    int over = 0;
    long n = PyLong_AsLongAndOverflow(copies, &over);
    if (over || n <= 0 || n > 0xFFFF) return PyErr_Occurred() ? -1 : 0;
    uint64_t number = PyLong_AsUnsignedLongLong(hash);
    if (PyErr_Occurred()) {
        PyErr_Clear(); /* no 64-bit number: for the careful way to refuse */
        return 0;
    }
    number = __builtin_bswap64(number);
    memcpy(name, &number, 8);
    uint32_t length = (uint32_t)PyLong_AsUnsignedLong(field(block, LENGTH));
    uint64_t at = PyLong_AsUnsignedLongLong(key);
    uint64_t parent = PyLong_AsUnsignedLongLong(field(block, PARENT));
    uint16_t count = (uint16_t)n;
    if (PyErr_Occurred()) return -1;
    to[0] = 0;
    memcpy(to + 1, &length, 4);
    memcpy(to + 5, &at, 8);
    memcpy(to + 13, &parent, 8);
    to[21] = 0;
    memcpy(to + 22, &count, 2);
    return 1;
}

static int pack_one(PyObject *blocks, PyObject *hash, PyObject *out, PyObject *rest) {
    unsigned char name[8], made[RECORD];
    PyObject *block = PyDict_GetItemWithError(blocks, hash);
    if (block == NULL && PyErr_Occurred()) return -1;
    int usual = block != NULL && Py_TYPE(block) == known ? record(hash, block, name, made) : 0;
    if (usual < 0) return -1;
    if (!usual) return PyList_Append(rest, hash);
    PyObject *key = PyBytes_FromStringAndSize((char *)name, 8);
    PyObject *value = PyBytes_FromStringAndSize((char *)made, RECORD);
    int bad = key == NULL || value == NULL || PyDict_SetItem(out, key, value) < 0;
    Py_XDECREF(key);
    Py_XDECREF(value);
    return bad ? -1 : 0;
}

PyDoc_STRVAR(pack_doc,
             "pack(hashes, blocks, block) -> (records, rest)\n\n"
             "Field and record of each hash that is bound to a usual block, and the hashes of all\n"
             "others. `block`: the type of the blocks.");

static PyObject *pack(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (nargs != 3 || !PyDict_Check(args[1]) || !PyType_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "pack: see its documentation");
        return NULL;
    }
    if (learn((PyTypeObject *)args[2]) < 0) return NULL;
    PyObject *each = PyObject_GetIter(args[0]), *out = PyDict_New(), *rest = PyList_New(0);
    PyObject *hash;
    int bad = each == NULL || out == NULL || rest == NULL;
    while (!bad && (hash = PyIter_Next(each)) != NULL) {
        bad = pack_one(args[1], hash, out, rest) < 0;
        Py_DECREF(hash);
    }
    Py_XDECREF(each);
    PyObject *both = bad || PyErr_Occurred() ? NULL : PyTuple_Pack(2, out, rest);
    Py_XDECREF(out);
    Py_XDECREF(rest);
    return both;
}

static PyMethodDef methods[] = {
    {"store", (PyCFunction)(void (*)(void))store, METH_FASTCALL, store_doc},
    {"pack", (PyCFunction)(void (*)(void))pack, METH_FASTCALL, pack_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_dense", NULL, 0, methods,
                                    NULL,                  NULL,     NULL, NULL};

PyMODINIT_FUNC PyInit__dense(void) { return PyModule_Create(&module); }
