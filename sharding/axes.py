"""The names of dimensions: letters for shapes, logical axes for sharding, axes of the mesh.

A letter names a dimension in an annotation (`Float[Array, "T N H"]`); a logical axis says what a
dimension of a concrete array is for (`axes=("embed", "heads", "head_dim")`), and a rules table
(`sharding.rules`) says which mesh axis it lands on.
"""

# The only letters of the project, upper case; two dimensions never differ by case alone.
LETTERS = {
    "B": "sequences",
    "T": "query tokens",
    "S": "key tokens",
    "D": "model width",
    "N": "query heads",
    "K": "key heads",
    "G": "query heads per key head, N / K",
    "H": "head width",
    "I": "index width",
    "F": "expert width",
    "E": "experts",
    "X": "experts per token",
    "V": "vocabulary",
    "L": "layers",
    "P": "pages",
    "Z": "tokens per page",
    "C": "chosen blocks",
    "R": "adapter rank",
}

# Logical axis -> its letter. `ranks` is the outermost axis of the page pool, one entry a device;
# `partials` that of sums which the tensor-parallel ranks have yet to add up, one entry a rank;
# `attended` is what attention hands to its output projection, all heads in one.
LOGICAL_AXES = {
    "batch": "B",
    "tokens": "T",
    "embed": "D",
    "heads": "N",
    "attended": "N",
    "kv_heads": "K",
    "head_dim": "H",
    "index_heads": "K",
    "mlp": "F",
    "experts": "E",
    "expert_mlp": "F",
    "vocab": "V",
    "layers": "L",
    "ranks": "dp x tp",
    "partials": "tp",
}

DATA = "data"
MODEL = "model"
MESH_AXES = (DATA, MODEL)

# The logical axes of one array, None where a dimension has none.
Axes = tuple[str | None, ...]
