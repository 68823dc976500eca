// seqtx.js - the functions of web.c for JavaScript: a model that trains on a text. Runs in
// a page's worker and in Node.js, without other files:
//     const model = await seqtx(bytes);           // bytes of seqtx.wasm
//     model.text(bytesOfAText);
//     model.open({metadata});                     // a new model, or open({bytes}) of a file
//     const nats = model.step();
// Functions throw the library's error. Arrays are copies.
'use strict';

const SEQTX_MOST = 12;      // web.c: MOST, the probabilities of a position

// The bytes of a safetensors file without tensors.
function seqtxHeader(metadata) {
    const json = new TextEncoder().encode(JSON.stringify({__metadata__: metadata}));
    const bytes = new Uint8Array(8 + json.length);
    new DataView(bytes.buffer).setBigUint64(0, BigInt(json.length), true);
    bytes.set(json, 8);
    return bytes;
}

// The metadata of a safetensors file.
function seqtxMetadata(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    const n = bytes.length < 8 ? 0 : Number(view.getBigUint64(0, true));
    if (n < 2 || n > bytes.length - 8) throw new Error('the file is not a safetensors file');
    const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + n)));
    return header.__metadata__ || {};
}

// The options of a trainer that web.c needs: struct options.
function seqtxNumbers(o, threads) {
    return [threads, o.seed, o['batch-sz'], o['block-sz'], o.lr, o['lr-warmup'], o.momentum,
        o['weight-decay'], o['grad-clip'], o['tau-start'] || 1, o['tau-end'] || 1,
        o['tau-steps'] || o.steps || 1, o['arch-from'] || 0, o['arch-lr'] || o.lr,
        o.streams && o.streams !== o['batch-sz'] ? 0 : 1];
}

// wasm: the bytes of seqtx.wasm, or a promise of seqtxThreads() of seqtx-threads.js.
// threads: their number, at most 4.
async function seqtx(wasm, threads = 1) {
    const module = await wasm;
    let c = new Proxy(module, {get: (_, name) => module['_' + name]}), memory = module.wasmMemory;
    if (!memory) {
        const {instance} = await WebAssembly.instantiate(module, {
            env: {emscripten_notify_memory_growth() {}}
        });
        c = instance.exports;
        memory = c.memory;
        c._initialize();
    }
    const utf8 = new TextDecoder(), encoder = new TextEncoder();
    let config = {};

    const bytesAt = (p, n) => new Uint8Array(memory.buffer, p, n);
    const floats = (p, n) => new Float32Array(memory.buffer, p, n).slice();
    const doubles = (p, n) => Array.from(new Float64Array(memory.buffer, p, n));
    const shape = i => c.web_shape(i) >>> 0;
    function string(p) {
        const all = bytesAt(p, memory.buffer.byteLength - p);
        return utf8.decode(all.slice(0, all.indexOf(0)));
    }
    function check(result) {
        if (!result || Number.isNaN(result)) throw new Error(string(c.web_error()));
        return result;
    }
    // Calls f with the address and length of a copy of bytes that ends with a zero.
    function given(bytes, f) {
        const p = check(c.web_alloc(bytes.length + 1));
        bytesAt(p, bytes.length).set(bytes);
        bytesAt(p, bytes.length + 1)[bytes.length] = 0;
        try {
            return f(p, bytes.length);
        } finally {
            c.web_free(p);
        }
    }
    // The same for a text, which is a string or bytes.
    const givenText = (text, f) =>
        given(typeof text === 'string' ? encoder.encode(text) : text, f);

    function withOptions(f) {
        const n = Float64Array.from(seqtxNumbers(config, threads));
        return given(new Uint8Array(n.buffer), p => givenText(config.optim, name => f(name, p)));
    }

    return {
        version: () => string(c.web_version()),
        backend: () => string(c.web_backend()),
        config: () => config,
        text: bytes => check(given(bytes, c.web_text)),

        // Opens the bytes of a checkpoint, or creates a model from the metadata of one.
        // Returns 'new', 'resumed', 'other text' or 'no state of training'.
        open({metadata, bytes}) {
            const file = bytes || seqtxHeader(metadata);
            config = JSON.parse((metadata || seqtxMetadata(bytes)).config || 'null');
            if (!config) throw new Error('expected a checkpoint of a trainer of seqtx');
            const status = withOptions((optim, o) =>
                given(file, (p, n) => check(c.web_open(p, n, optim, o))));
            // what this page does not do, as the trainer's options say it
            Object.assign(config, {schedule: 'constant', precision: 'f32', steps: 0,
                streams: config['batch-sz'], 'batch-split': 1, data: 'text.txt', minutes: 0,
                epochs: 0, plan: null});
            if (!bytes) return 'new';
            return [, 'resumed', 'other text', 'no state of training'][status];
        },
        derive() {
            const pattern = string(c.web_pattern());
            withOptions(check_derive);
            config = Object.assign({}, config, {pattern, latency: 'none'});
            return pattern;
            function check_derive(optim) {
                check(c.web_derive(optim));
            }
        },
        save() {
            const json = JSON.stringify(Object.assign({}, config, {steps: c.web_steps()}));
            const p = check(givenText(json, c.web_save));
            return bytesAt(p, shape(0)).slice();
        },

        step: () => check(c.web_step()),
        steps: () => c.web_steps(),
        parameters: () => c.web_parameters(),
        bytes: () => memory.buffer.byteLength,
        heldOut: segments => check(c.web_held_out(segments)),
        setRate(lr) {
            config.lr = lr;
            c.web_set_lr(lr);
        },
        setSpan(loss, ramp) {
            config['adapt-span-loss'] = loss;
            config['adapt-span-ramp'] = ramp;
            c.web_set_span(loss, ramp);
        },

        // [{id, bytes, likely: [{bytes, p}]}] for each token of a text and its continuation.
        sample(text, count, temperature, topP, seed) {
            const p = check(givenText(text, (s, n) =>
                c.web_sample(s, n, count, temperature, topP, seed)));
            const rows = shape(0), row = shape(1), all = floats(p, rows * row), out = [];
            const piece = id => {
                const at = c.web_piece(id);
                return bytesAt(at, shape(0)).slice();
            };
            for (let i = 0; i < rows; i++) {
                const likely = [];
                for (let k = 0; k < SEQTX_MOST; k++) {
                    const q = all[i * row + 1 + SEQTX_MOST + k];
                    if (q > 0) likely.push({bytes: piece(all[i * row + 1 + k]), p: q});
                }
                out.push({id: all[i * row], bytes: piece(all[i * row]), likely});
            }
            return out;
        },
        // The map of a layer over the end of a text, or null if it has no attention.
        attention(text, layer) {
            const p = givenText(text, (s, n) => c.web_attention(s, n, layer));
            const why = p ? '' : string(c.web_error());
            if (why) throw new Error(why);
            if (!p) return null;
            const [heads, queries, keys] = [shape(0), shape(1), shape(2)];
            const from = new Int32Array(memory.buffer, c.web_keys(), 3 * keys);
            return {
                heads, queries, keys, count: [3, 4, 5, 6, 7].map(shape),
                weight: floats(p, heads * queries * keys),
                key: Array.from({length: keys}, (_, i) => ({kind: from[3 * i],
                    first: from[3 * i + 1], tokens: from[3 * i + 2]}))
            };
        },
        spans() {
            const p = c.web_spans();
            if (!p) return null;
            const [layers, heads, most] = [shape(0), shape(1), shape(2)];
            const all = doubles(p, layers * (heads + 1));
            return {layers, heads, most, spans: all.slice(0, layers * heads),
                windows: all.slice(layers * heads)};
        },
        gates(text, layer) {
            const p = check(givenText(text, (s, n) => c.web_gates(s, n, layer)));
            const [tokens, units] = [shape(0), shape(1)];
            return {tokens, units, values: floats(p, 3 * tokens * units)};
        },
        memories() {
            const p = c.web_memories();
            if (!p) return null;
            const layers = shape(0), ratio = shape(1), all = doubles(p, 5 * layers);
            return {ratio, layers: Array.from({length: layers}, (_, l) => {
                const [rows, capacity, compressed, most, error] = all.slice(5 * l, 5 * l + 5);
                return {rows, capacity, compressed, most, error};
            })};
        },
        probabilities() {
            const p = c.web_probabilities();
            return p ? doubles(p, shape(0) * 3) : null;
        },
        tau: () => c.web_tau(),
        plannedTau: step => c.web_planned_tau(step),
        pattern: () => string(c.web_pattern())
    };
}

if (typeof module !== 'undefined') module.exports =
    {seqtx, seqtxHeader, seqtxMetadata, seqtxNumbers};
