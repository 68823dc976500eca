// worker.js - the worker of the page: trains in slices of a tenth of a second, so that it
// answers between them. A message is {id, call, args}; the answer is {id, result} or
// {id, error}. While it trains, it sends {progress}.
'use strict';

let model, running = false, pause = 0, sinceHeldOut = 0;
const SLICE = 100, EVERY = 20, SEGMENTS = 2;    // ms; steps from one evaluation to the next

// What changes with every step.
function state(losses, took, heldOut) {
    return {
        steps: model.steps(), losses, took, heldOut, bytes: model.bytes(),
        spans: model.spans(), memories: model.memories(), tau: model.tau(),
        probabilities: model.probabilities(), pattern: model.pattern()
    };
}

function train(most, until) {
    const losses = [], begin = performance.now();
    do losses.push(model.step());
    while (losses.length < most && performance.now() - begin < until);
    const progress = state(losses, performance.now() - begin);
    sinceHeldOut += losses.length;
    if (sinceHeldOut >= EVERY || progress.steps === losses.length) {
        progress.heldOut = model.heldOut(SEGMENTS);
        sinceHeldOut = 0;
    }
    postMessage({progress});
}

function slice() {
    if (!running) return;
    try {
        train(pause ? 1 : Infinity, SLICE);
        setTimeout(slice, pause);
    } catch (e) {
        running = false;
        postMessage({failed: e.message});
    }
}

const calls = {
    // base: where seqtx-threads.js is, if the page may share memory between threads
    async load({wasm, base, threads}) {
        if (base) {
            const main = new URL('seqtx-threads.js', base).href;
            importScripts(main);
            wasm = seqtxThreads({mainScriptUrlOrBlob: main,
                locateFile: name => new URL(name, base).href});
        }
        model = await seqtx(wasm, threads);
        return model.version();
    },
    text: bytes => model.text(bytes),
    open(what) {
        running = false;
        sinceHeldOut = 0;
        const status = model.open(what), config = model.config();
        const x = Array.from({length: 41}, (_, i) => (config['tau-steps'] || 0) * i / 40);
        return Object.assign(state([], 0), {status, config, parameters: model.parameters(),
            backend: model.backend(), planned: {x, y: x.map(model.plannedTau)}});
    },
    derive() {
        running = false;
        sinceHeldOut = 0;
        const pattern = model.derive();
        return Object.assign(state([], 0), {found: pattern, config: model.config(),
            parameters: model.parameters()});
    },
    start(ms) {
        pause = ms;
        if (!running) {
            running = true;
            setTimeout(slice, 0);
        }
    },
    speed(ms) {
        pause = ms;
    },
    pause() {
        running = false;
        return model.steps();
    },
    step: n => train(n, Infinity),
    save: () => model.save(),
    setSpan: ([loss, ramp]) => model.setSpan(loss, ramp),
    sample: ([text, count, temperature, seed]) =>
        model.sample(text, count, temperature, 0.95, seed),
    attention: ([text, layer]) => model.attention(text, layer),
    gates: ([text, layer]) => model.gates(text, layer)
};

onmessage = async ({data: {id, call, args}}) => {
    try {
        postMessage({id, result: await calls[call](args)});
    } catch (e) {
        postMessage({id, error: e.message});
    }
};
