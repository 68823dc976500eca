#!/usr/bin/env python3
"""A PAR checkpoint written by TensorFlow: Keras 2 objects with the reference's names
(docs/convert.md).

    python3 par_tensorflow.py                   writes par_ckpt-3.index and
                                                par_ckpt-3.data-00000-of-00001
    python3 par_tensorflow.py --check PREFIX    restores a file that tools/convert.py made from
                                                it, and compares the values

Needs tensorflow and tf_keras (pip install tensorflow-cpu tf_keras); tests/io/test_convert.py
needs only `numbers`.
"""
import os
import re
import shutil
import sys
import tempfile

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
D, H, F, V, BLOCKS, CUTS = 4, 2, 6, 12, 2, (3, 7)


def numbers(path, shape):
    """float32 values, all exact, another sequence for each path. u and v have their long
    names in it."""
    path = re.sub("/rmha/u$", "/rmha/global_content_bias",
                  re.sub("/rmha/v$", "/rmha/global_position_bias", path))
    k = np.arange(int(np.prod(shape)),
                  dtype=np.int64) * 7919 + sum(i * c
                                               for i, c in enumerate(path.encode(), 1)) * 104729
    return ((k % 2001 - 1000) / 1024).astype(np.float32).reshape(shape)


def make():
    """Makes the objects and their variables: (tensorflow, checkpoint, model)."""
    import tensorflow as tf
    import tf_keras as keras

    class Attention(keras.layers.Layer):
        def build(self, _):
            self.W_emb, self.W_pos, self.dense = (keras.layers.Dense(n) for n in (3 * D, D, D))
            for layer in (self.W_emb, self.W_pos, self.dense):
                layer.build((None, D))
            self.u = self.add_weight(name="global_content_bias", shape=(1, H, 1, D // H))
            self.v = self.add_weight(name="global_position_bias", shape=(1, H, 1, D // H))

    class Block(keras.layers.Layer):
        def build(self, _):
            self.rmha = Attention()
            self.rmha.build(None)
            self.ffn = keras.Sequential([keras.layers.Dense(F), keras.layers.Dense(D)])
            self.layernorm_mha = keras.layers.LayerNormalization()
            self.layernorm_ffn = keras.layers.LayerNormalization()
            for layer in (self.ffn, self.layernorm_mha, self.layernorm_ffn):
                layer.build((None, D))
            self.pi = self.add_weight(name="pi", shape=(3,))
            self.tau = self.add_weight(name="tau", shape=())

    class Output(keras.layers.Layer):
        def build(self, _):
            self.head_w = keras.layers.Dense(CUTS[0] + len(CUTS))
            self.head_w.build((None, D))
            self.tail_w = []
            for i, (a, b) in enumerate(zip(CUTS, CUTS[1:] + (V,))):
                tail = keras.Sequential([keras.layers.Dense(D // 2 ** (i + 1)),
                                         keras.layers.Dense(b - a)])
                tail.build((None, D))
                self.tail_w.append(tail)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed, self.final_layer = keras.layers.Embedding(V, D), Output()
            self.stoch_blks = [Block() for _ in range(BLOCKS)]
            for layer in [self.embed, self.final_layer] + self.stoch_blks:
                layer.build(None)
    model = Model()
    adam = keras.optimizers.legacy.Adam(1e-3)
    adam.apply_gradients([(tf.zeros_like(v), v) for v in model.trainable_variables])
    return tf, tf.train.Checkpoint(model=model, optimizer=adam,
                                   glob_step=tf.Variable(5, dtype=tf.int64)), model


def paths(tf, prefix):
    """[(object path, shape)] of the model's variables in a file."""
    tail = "/.ATTRIBUTES/VARIABLE_VALUE"
    return [(name[:-len(tail)], shape) for name, shape in tf.train.list_variables(prefix)
            if name.startswith("model/") and name.endswith(tail) and "OPTIMIZER" not in name]


def follow(root, path):
    """The variable at an object path."""
    for part in path.split("/"):
        root = root._lookup_dependency(part)
    return root


def write():
    tf, saved, _ = make()
    with tempfile.TemporaryDirectory() as work:
        first = saved.write(os.path.join(work, "first"))
        for path, shape in paths(tf, first):
            follow(saved, path).assign(numbers(path, shape))
        saved.save_counter.assign(2)
        last = saved.save(os.path.join(work, "par_ckpt"))
        for name in (".index", ".data-00000-of-00001"):
            shutil.copyfile(last + name, os.path.join(HERE, os.path.basename(last) + name))
    return 0


def check(prefix):
    tf, saved, model = make()
    reader = tf.train.load_checkpoint(prefix)
    bad = [path for path, shape in paths(tf, prefix)
           if not np.array_equal(reader.get_tensor(path + "/.ATTRIBUTES/VARIABLE_VALUE"),
                                 numbers(path, shape))]
    fresh = tf.train.Checkpoint(model=model)
    status = fresh.restore(prefix)
    status.assert_consumed()                    # every variable of the file has an object ..
    status.assert_existing_objects_matched()    # .. and every object a variable
    bad += [path for path, shape in paths(tf, prefix)
            if not np.array_equal(follow(saved, path).numpy(), numbers(path, shape))]
    latest = tf.train.latest_checkpoint(os.path.dirname(prefix) or ".")
    print(f"TensorFlow {tf.__version__}: {len(paths(tf, prefix))} variables restored, "
          f"{len(bad)} with other numbers {bad[:4]}, save_counter {int(fresh.save_counter)}, "
          f"the newest is {os.path.basename(latest or 'none')}")
    return 1 if bad or len(model.variables) != len(paths(tf, prefix)) else 0


if __name__ == "__main__":
    sys.exit(check(sys.argv[2]) if sys.argv[1:2] == ["--check"] else write())
