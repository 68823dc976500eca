// page.js - the page: draws what worker.js reports, and asks it for what a panel shows.
'use strict';

const $ = id => document.getElementById(id);
const data = JSON.parse($('data').textContent);
const still = matchMedia('(prefers-reduced-motion: reduce)');
const WINDOW = 4;           // segments of held-out text that the panels show
const KEPT = 2000;          // points of a curve

// What the page knows of the model. history: steps and values of curves.
const now = {family: '', config: null, running: false, busy: false, text: null, name: '',
    history: {}, sample: [], at: -1, query: -1, cell: null, before: null};


// >>worker

const worker = new Worker(URL.createObjectURL(
    new Blob([$('worker').textContent], {type: 'text/javascript'})));
const waiting = new Map();
let calls = 0;

function ask(call, args) {
    return new Promise((resolve, reject) => {
        waiting.set(++calls, {resolve, reject});
        worker.postMessage({id: calls, call, args});
    });
}

worker.onmessage = ({data: m}) => {
    if (m.progress) return progress(m.progress);
    if (m.failed) {
        setRunning(false);
        return fail(m.failed);
    }
    const {resolve, reject} = waiting.get(m.id);
    waiting.delete(m.id);
    if (m.error === undefined) resolve(m.result);
    else reject(new Error(m.error));
};
worker.onerror = e => fail(e.message || 'the worker cannot be started');

async function unpacked(base64) {
    const bytes = Uint8Array.from(atob(base64), c => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
    return new Uint8Array(await new Response(stream).arrayBuffer());
}

function fail(why) {
    $('error').textContent = why;
    $('error').hidden = !why;
}

// Runs an action of the reader: shows its error, and not two at a time.
async function act(f) {
    if (now.busy) return;
    now.busy = true;
    fail('');
    try {
        await f();
    } catch (e) {
        setRunning(false);
        fail(e.message);
    }
    now.busy = false;
}


// >>text

const utf8 = new TextDecoder('utf-8', {fatal: true});

// The characters of bytes, one string per byte: a character of several bytes is at the
// first of them, and the others are ''.
function characters(bytes) {
    const out = [];
    for (let i = 0; i < bytes.length; i++) {
        const b = bytes[i];
        const n = [1, 0, 2, 3, 4][(b >= 0x80) + (b >= 0xC0) + (b >= 0xE0) + (b >= 0xF0)];
        let c = '·';
        if (b === 10) c = '↵';
        else if (b === 32) c = ' ';
        else if (n === 1 && b > 32 && b < 127) c = String.fromCharCode(b);
        else if (n > 1) {
            try {
                c = utf8.decode(bytes.subarray(i, i + n));
                out.push(c);
                for (let k = 1; k < n; k++, i++) out.push('');
                continue;
            } catch (e) { /* not UTF-8: a dot */ }
        }
        out.push(c);
    }
    return out;
}

// Lines of 23 random letters out of 16, each of which comes twice. A model that looks 24
// bytes back can reach 23 log2(16) / 48 = 1.92 bits per byte.
function echo() {
    const lines = [];
    for (let i = 0, r = 12345; i < 2600; i++) {
        let line = '';
        for (let k = 0; k < 23; k++) {
            r = (Math.imul(r, 1103515245) + 12345) & 0x7fffffff;
            line += 'abcdefghijklmnop'[r >> 16 & 15];
        }
        lines.push(line, line);
    }
    return new TextEncoder().encode(lines.join('\n') + '\n');
}

const shipped = async name => name === 'echo' ? echo() : unpacked(data.texts[name]);

const named = c => (c === ' ' ? '␣' : c) || '·';

// The n bytes that the panels show: held-out text and then what the reader typed, whose
// first byte is `typed`.
function shownText(n) {
    const part = Math.floor(now.text.length / 20), held = now.text.length - 2 * part;
    const mine = new TextEncoder().encode($('prompt').value).slice(-n), typed = n - mine.length;
    const line = now.text.indexOf(10, held + typed) + 1;    // if possible, whole lines
    const end = line > 0 && line <= held + part ? line : held + typed;
    const bytes = new Uint8Array(n);
    bytes.set(now.text.subarray(end - typed, end));
    bytes.set(mine, typed);
    return {bytes, typed};
}

// The same as a map of attention needs it: whole segments, and the target of the last byte.
async function attentionMap(layer) {
    const n = WINDOW * now.config['block-sz'], {bytes, typed} = shownText(n);
    const read = new Uint8Array(n + 1);
    read.set(bytes);
    const map = await ask('attention', [read, layer]);
    return map && Object.assign(map, {layer, bytes, typed});
}


// >>drawing

const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function canvas(id) {
    const c = $(id), scale = devicePixelRatio || 1, w = c.clientWidth, h = c.clientHeight;
    if (c.width !== Math.round(w * scale) || c.height !== Math.round(h * scale)) {
        c.width = Math.round(w * scale);
        c.height = Math.round(h * scale);
    }
    const g = c.getContext('2d');
    g.setTransform(scale, 0, 0, scale, 0, 0);
    g.clearRect(0, 0, w, h);
    g.font = '12px system-ui, sans-serif';
    g.textBaseline = 'middle';
    return {g, w, h};
}

// A point of a curve. When there are too many, every second one is dropped.
function add(name, x, y) {
    const h = now.history[name] = now.history[name] || {x: [], y: [], every: 1, n: 0};
    if (h.n++ % h.every || !Number.isFinite(y)) return;
    h.x.push(x);
    h.y.push(y);
    if (h.x.length < KEPT) return;
    h.x = h.x.filter((_, i) => i % 2 === 0);
    h.y = h.y.filter((_, i) => i % 2 === 0);
    h.every *= 2;
}

const round = v => v.toFixed((v < 100) + (v < 10));

// Steps of an axis: about n of them, 1, 2 or 5 times a power of ten.
function ticks(from, to, n) {
    const raw = (to - from) / n || 1, ten = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find(k => k * ten >= raw) * ten, out = [];
    for (let v = Math.ceil(from / step) * step; v <= to + step / 1e6; v += step) out.push(v);
    return out;
}

const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

// lines: [{name, label, hue, dash, dots}] of now.history. Labels are at the ends of the
// lines, so that no reader depends on the colours.
function chart(id, lines, {least, most, unit}) {
    const {g, w, h} = canvas(id), left = 38, right = 92, top = 22, bottom = 24;
    const all = lines.map(l => Object.assign({h: now.history[l.name]}, l))
        .filter(l => l.h && l.h.x.length);
    const x1 = Math.max(10, ...all.map(l => l.h.x[l.h.x.length - 1]));
    let lo = least, hi = most;
    for (const l of all)
        for (const v of l.h.y) {
            if (least === undefined && !(v > lo)) lo = v;
            if (most === undefined && !(v < hi)) hi = v;
        }
    if (!(hi > lo)) [lo, hi] = [lo || 0, (lo || 0) + 1];
    const X = v => left + (w - left - right) * v / x1;
    const Y = v => top + (h - top - bottom) * (hi - v) / (hi - lo);
    g.strokeStyle = color('--line');
    g.fillStyle = color('--faint');
    g.lineWidth = 1;
    g.setLineDash([]);
    for (const v of ticks(lo, hi, 4)) {
        g.beginPath();
        g.moveTo(left, Y(v));
        g.lineTo(w - right, Y(v));
        g.stroke();
        g.textAlign = 'right';
        g.fillText(String(Number(round(v))), left - 6, Y(v));
    }
    g.textAlign = 'center';
    for (const v of ticks(0, x1, w < 500 ? 3 : 5))
        if (X(v) < w - right - 70) g.fillText(String(v), X(v), h - 9);
    g.textAlign = 'right';
    g.fillText('step ' + x1, w - right, h - 9);
    g.textAlign = 'left';
    if (unit) g.fillText(unit, 0, 6);
    const ends = [];
    all.forEach(l => {
        g.strokeStyle = g.fillStyle = color('--c' + l.hue);
        g.lineWidth = 2;
        g.setLineDash(l.dash || []);
        g.beginPath();
        l.h.x.forEach((x, i) => g.lineTo(X(x), Y(l.h.y[i])));
        g.stroke();
        g.setLineDash([]);
        if (l.dots)
            l.h.x.forEach((x, i) => {
                g.beginPath();
                g.arc(X(x), Y(l.h.y[i]), 3, 0, 7);
                g.fill();
            });
        ends.push({y: Y(l.h.y[l.h.y.length - 1]), text: l.label, hue: l.hue});
    });
    ends.sort((a, b) => a.y - b.y);     // labels that would overlap move down, then up
    ends.forEach((e, i) => { if (i) e.y = Math.max(e.y, ends[i - 1].y + 14); });
    for (let i = ends.length - 1, y = h - bottom; i >= 0; i--, y -= 14)
        if (ends[i].y > y) ends[i].y = y;
    for (const e of ends) {
        g.fillStyle = color('--c' + e.hue);
        g.fillText(e.text, w - right + 8, e.y);
    }
}

// Characters with shades: weights in [0,1]. The reader typed those for which `given` holds.
function shaded(id, chars, weight, chosen, given) {
    const box = $(id);
    while (box.children.length > chars.length) box.lastChild.remove();
    while (box.children.length < chars.length) box.append(document.createElement('span'));
    chars.forEach((c, i) => {
        const s = box.children[i], w = weight(i);
        const look = w > 0 ? `rgba(var(--shade), ${w.toFixed(3)})` : '';
        if (s.textContent !== c) s.textContent = c;
        if (s.style.backgroundColor !== look) s.style.backgroundColor = look;
        s.classList.toggle('on', i === chosen);
        s.classList.toggle('given', given(i));
    });
}

// Calls f(index) when the reader points at a child of an element or moves by arrow keys.
function choosable(id, current, f) {
    const box = $(id);
    const at = e => Array.prototype.indexOf.call(box.children, e.target.closest(`#${id} > *`));
    const point = e => { const i = at(e); if (i >= 0) f(i); };
    box.addEventListener('pointermove', point);
    box.addEventListener('pointerdown', point);
    box.addEventListener('keydown', e => {
        const step = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10}[e.key];
        const n = box.children.length;
        if (!step || !n) return;
        e.preventDefault();
        f(Math.min(n - 1, Math.max(0, current() + step)));
    });
}


// >>panels: always

function drawLoss() {
    chart('loss', [{name: 'loss', label: 'loss', hue: 0},
        {name: 'held', label: 'held out', hue: 1, dots: true},
        {name: 'search', label: 'search', hue: 2, dash: [2, 3]}], {unit: 'bits per byte'});
    const last = n => now.history[n] && now.history[n].y[now.history[n].y.length - 1];
    const [loss, held] = [last('loss'), last('held')];
    $('n-loss').textContent = loss === undefined ? '–' : loss.toFixed(2);
    $('n-held').textContent = held === undefined ? '–' : held.toFixed(2);
    $('loss').setAttribute('aria-label', loss === undefined ? 'Loss: no step yet'
        : `Loss: ${loss.toFixed(2)} bits per byte, held out ${held ? held.toFixed(2) : 'not yet'}`);
}

let seed = 1;
async function takeSample() {
    const prompt = $('prompt').value || '\n';
    now.given = new TextEncoder().encode(prompt).length;
    now.sample = await ask('sample', [prompt, 280, Number($('temperature').value), seed]);
    drawSample();
}

function drawSample() {
    const chars = characters(Uint8Array.from(now.sample.flatMap(t => Array.from(t.bytes))));
    shaded('sample', chars.map(c => c === '↵' ? '↵\n' : c), i => {
        const t = now.sample[i];
        if (i < now.given || !t) return 0;
        const was = t.likely.find(l => l.bytes[0] === t.bytes[0]);
        return Math.min(0.5, -Math.log(was ? was.p : 0.003) / 12);
    }, now.at, i => i < now.given);
    drawExpected(Math.max(now.at, now.given));
}

function drawExpected(i) {
    const t = now.sample[i], box = $('expected');
    if (!t || !t.likely.length) return;
    const name = b => named(characters(Uint8Array.from(b))[0]);
    const shown = t.likely.slice(0, 10);
    while (box.children.length < shown.length) {
        const li = document.createElement('li');
        li.append(document.createElement('span'), document.createElement('i'),
            document.createElement('b'));
        box.append(li);
    }
    while (box.children.length > shown.length) box.lastChild.remove();
    shown.forEach((l, k) => {
        const [c, bar, p] = box.children[k].children;
        c.textContent = name(l.bytes);
        bar.style.width = Math.max(1, 100 * l.p) + '%';
        p.textContent = (100 * l.p).toFixed(l.p < 0.1 ? 1 : 0) + ' %';
    });
    const before = now.sample.slice(Math.max(0, i - 8), i).map(s => name(s.bytes)).join('');
    $('expected-of').textContent = `After “${before}”, it wrote “${name(t.bytes)}”`;
}


// >>panels: Sequential Transformer

const penalty = k => k ? 1e-6 * 10 ** (k / 10) : 0;

function drawSpans(p) {
    if (!p) return;
    const lines = [];
    let longest = 0;
    for (let l = 0; l < p.layers; l++)
        for (let h = 0; h < p.heads; h++) {
            if (p.spans[l * p.heads + h] > p.spans[longest]) longest = l * p.heads + h;
            lines.push({name: `span${l}.${h}`, hue: l % 4, dash: DASHES[h % 4],
                label: `layer ${l + 1}.${h + 1}`});
        }
    chart('spans', lines, {least: 0, unit: 'tokens'});
    const mean = p.spans.reduce((a, b) => a + b, 0) / p.spans.length;
    $('spans-say').textContent = `Longest: ${p.spans[longest].toFixed(0)} tokens, head ` +
        `${longest % p.heads + 1} of layer ${Math.floor(longest / p.heads) + 1}; mean ` +
        `${mean.toFixed(1)} of at most ${p.most}. Windows of the layers: ${p.windows.join(', ')}.`;
    $('spans').setAttribute('aria-label', 'Spans. ' + $('spans-say').textContent);
}

async function takeMask() {
    const [layer, head] = $('head').value.split('.').map(Number);
    const map = await attentionMap(layer);
    if (map) drawMask(now.map = Object.assign(map, {head}));
}

function drawMask(map) {
    const {head, queries, keys} = map, all = characters(map.bytes);
    const q = now.query < 0 ? queries - 1 : Math.min(now.query, queries - 1);
    const first = map.bytes.length - queries;   // of the last segment
    const shown = map.key.map((k, j) => ({j, at: first + k.first})).filter(k => k.at >= 0);
    const chars = shown.map(k => all[k.at]);
    const R = now.config['adapt-span-ramp'], zL = now.spans.spans[map.layer *
        now.spans.heads + head];
    const here = shown.length - queries + q;    // the query, as a character
    const mask = i => i > here ? 0 : Math.min(1, Math.max(0, 1 + (1 - (here - i) + zL) / R));
    const weight = i => map.weight[(head * queries + q) * keys + shown[i].j];
    const given = i => shown[i].at >= map.typed;
    shaded('mask', chars, i => 0.45 * mask(i), here, given);
    shaded('attention', chars, i => Math.sqrt(weight(i)) * 0.9, here, given);
    let most = 0;
    for (let i = 1; i <= here; i++) if (weight(i) > weight(most)) most = i;
    $('mask-say').textContent = `Head ${head + 1} of layer ${map.layer + 1} at “` +
        `${named(chars[here])}”: span ${zL.toFixed(1)}, ramp ${R}; most attention to ` +
        `“${named(chars[most])}”, ${here - most} back: ${(100 * weight(most)).toFixed(0)} %.`;
}


// >>panels: SRU

async function takeGates() {
    const layer = Number($('gates-layer').value), columns = $('gates').clientWidth / 9 - 2;
    const shown = shownText(Math.max(24, Math.min(96, Math.floor(columns))));
    now.gates = Object.assign(await ask('gates', [shown.bytes, layer]), shown);
    drawGates();
}

// A scale of one hue, from the card's colour to the ink: readable without colours.
function shade(v) {
    const dark = matchMedia('(prefers-color-scheme: dark)').matches;
    const from = dark ? [25, 29, 36] : [255, 255, 255];
    const mid = dark ? [40, 100, 150] : [86, 160, 211], to = dark ? [255, 236, 160] : [8, 29, 88];
    const [a, b, t] = v < 0.5 ? [from, mid, 2 * v] : [mid, to, 2 * v - 1];
    return a.map((c, i) => Math.round(c + (b[i] - c) * t));
}

function drawGates() {
    const G = now.gates;
    if (!G) return;
    const {g, w, h} = canvas('gates'), what = Number($('gates-what').value);
    const {tokens: T, units: U, values} = G, chars = characters(G.bytes);
    const value = (t, o, k) => values[(t * 3 + k) * U + o];
    const mean = Array.from({length: U}, (_, o) => {
        let s = 0;
        for (let t = 0; t < T; t++) s += value(t, o, 0);
        return s / T;
    });
    const order = Array.from(mean.keys()).sort((a, b) => mean[b] - mean[a]);
    let most = 1e-9;
    if (what === 2) for (let t = 0; t < T; t++)
        for (let o = 0; o < U; o++) most = Math.max(most, Math.abs(value(t, o, 2)));
    const scaled = (t, o) => what === 2 ? 0.5 + value(t, o, 2) / most / 2 : value(t, o, what);

    const image = new ImageData(T, U);
    for (let t = 0; t < T; t++)
        for (let k = 0; k < U; k++)
            image.data.set([...shade(scaled(t, order[k])), 255], 4 * (k * T + t));
    const small = document.createElement('canvas');
    small.width = T;
    small.height = U;
    small.getContext('2d').putImageData(image, 0, 0);
    const left = 22, top = 20, W = w - left, H = h - top - 18;
    g.imageSmoothingEnabled = false;
    g.drawImage(small, left, top, W, H);
    now.grid = {left, top, W, H, T, U};

    g.fillStyle = color('--faint');
    g.textAlign = 'center';
    const every = Math.ceil(8 / (W / T));
    chars.forEach((c, t) => {
        g.fillStyle = color(t < G.typed ? '--faint' : '--ink');
        g.font = `${t < G.typed ? '' : 'bold '}12px system-ui, sans-serif`;
        if (t % every === 0) g.fillText(named(c), left + W * (t + 0.5) / T, 9);
    });
    g.fillStyle = color('--faint');
    g.font = '12px system-ui, sans-serif';
    g.save();
    g.translate(9, top + H / 2);
    g.rotate(-Math.PI / 2);
    g.fillText('forgets  ←  units  →  remembers', 0, 0);
    g.restore();
    const [low, high] = what === 2 ? ['−' + most.toFixed(1), most.toFixed(1)] : ['0', '1'];
    g.textAlign = 'left';
    g.fillText(low, left, h - 7);
    for (let i = 0; i < 80; i++) {
        g.fillStyle = `rgb(${shade(i / 79)})`;
        g.fillRect(left + 28 + i, h - 12, 1.5, 10);
    }
    g.fillStyle = color('--faint');
    g.fillText(high, left + 114, h - 7);

    const cell = now.cell || {t: Math.min(8, T - 1), k: 0};
    const t = Math.min(cell.t, T - 1), k = Math.min(cell.k, U - 1), o = order[k];
    g.strokeStyle = color('--c1');
    g.lineWidth = 2;
    g.strokeRect(left + W * t / T - 1, top + H * k / U - 1, W / T + 2, H / U + 2);
    const before = chars.slice(Math.max(0, t - 8), t + 1).map(named).join('');
    const [f, r, c] = [0, 1, 2].map(i => value(t, o, i).toFixed(2));
    $('gates-say').textContent = `Unit ${o} at “${before}”: f ${f}, r ${r}, c′ ${c}. Mean f ` +
        `${mean[o].toFixed(2)}: a memory of about ${(1 / (1 - mean[o] + 1e-6)).toFixed(1)} steps.`;
}

function chooseCell(t, k) {
    const {T, U} = now.grid;
    now.cell = {t: Math.min(T - 1, Math.max(0, t)), k: Math.min(U - 1, Math.max(0, k))};
    drawGates();
}


// >>panels: Compressive Transformer

async function takeMemory() {
    const map = await attentionMap(Number($('memory-layer').value));
    if (map) drawMemory(now.map = map);
}

const STORES = [, ['Compressed memory', 'rows are lost at its left end'],
    ['Memory', 'r rows become one compressed row'], ['Segment', 'becomes the next memory']];

function drawMemory(map) {
    const head = Number($('memory-head').value), all = characters(map.bytes);
    const first = map.bytes.length - map.queries, box = $('memory');
    const q = now.query < 0 ? map.queries - 1 : Math.min(now.query, map.queries - 1);
    const weight = j => map.weight[(head * map.queries + q) * map.keys + j];
    const sums = [0, 0, 0, 0];
    if (!box.children.length)
        for (const kind of [1, 2, 3]) {
            const store = document.createElement('div'), title = document.createElement('h3');
            const rows = document.createElement('div'), down = document.createElement('p');
            store.className = 'store';
            rows.className = 'rows';
            rows.id = 'rows-' + kind;
            down.className = 'down';
            down.textContent = (kind === 1 ? '← ' : '↑ ') + STORES[kind][1];
            store.append(title, rows, down);
            box.append(store);
            if (kind === 3) {
                rows.tabIndex = 0;
                rows.setAttribute('role', 'group');
                rows.setAttribute('aria-label', 'Segment. The arrow keys choose the position.');
                choosable('rows-3', () => now.query < 0 ? map.queries - 1 : now.query, i => {
                    now.query = i;
                    drawMemory(now.map);
                });
            }
        }
    for (const kind of [1, 2, 3]) {
        const keys = map.key.map((k, j) => Object.assign({j}, k)).filter(k => k.kind === kind);
        const [title] = box.children[kind - 1].children;
        shaded('rows-' + kind, keys.map(k => {
            const from = Math.max(0, first + k.first), to = first + k.first + k.tokens;
            return all.slice(from, Math.max(from, to)).map(named).join('') || '·';
        }), i => {
            sums[kind] += weight(keys[i].j);
            return Math.sqrt(weight(keys[i].j)) * 0.9;
        }, kind === 3 ? q : -1, i => first + keys[i].first >= map.typed);
        const text = keys.reduce((n, k) => n + k.tokens, 0);
        title.textContent = `${STORES[kind][0]}: ${keys.length} rows, ${text} characters`;
    }
    const percent = v => (100 * v).toFixed(0) + ' %';
    $('memory-say').textContent = `Head ${head + 1} at “${named(all[first + q])}” gives ` +
        `${percent(sums[1])} of its attention to the compressed memory, ${percent(sums[2])} to ` +
        `the memory and ${percent(sums[3])} to the segment.`;
}

function drawLost(p) {
    if (!p) return;
    const lines = p.layers.map((_, l) => ({name: 'lost' + l, hue: l % 4, dash: DASHES[l % 4],
        label: 'layer ' + (l + 1)}));
    chart('lost', lines, {least: 0});
    const last = lines.map(l => now.history[l.name]).map(h => h && h.y[h.y.length - 1]);
    if (last.some(v => v === undefined)) {
        $('lost-say').textContent = 'Nothing was compressed yet: the memory is not full.';
        return;
    }
    $('lost-say').textContent = 'Lost now: ' +
        last.map((v, l) => `${v.toFixed(3)} in layer ${l + 1}`).join(', ') + '.';
    $('lost').setAttribute('aria-label', 'What compression lost. ' + $('lost-say').textContent);
}


// >>panels: PAR

function drawSearch(p) {
    const found = p.pattern, box = $('blocks'), names = ['attention', 'feed-forward', 'identity'];
    const all = p.probabilities || Array.from(found, c => ['s', 'f', 'i'].map(x => +(x === c)))
        .flat();
    const L = all.length / 3;
    while (box.children.length > L) box.lastChild.remove();
    while (box.children.length < L) {
        const row = document.createElement('div');
        row.className = 'block';
        row.innerHTML = '<span></span><div class="share" role="img">' +
            '<i class="s"></i><i class="f"></i><i class="i"></i></div>';
        box.append(row);
    }
    for (let l = 0; l < L; l++) {
        const [label, share] = box.children[l].children, q = all.slice(3 * l, 3 * l + 3);
        label.textContent = 'block ' + (l + 1);
        q.forEach((v, k) => {
            share.children[k].style.flexGrow = v;
            share.children[k].innerHTML = v > 0.2 ? `<b>${(100 * v).toFixed(0)} %</b>` : '';
        });
        share.setAttribute('aria-label', `block ${l + 1}: ` +
            q.map((v, k) => `${names[k]} ${(100 * v).toFixed(0)} %`).join(', '));
    }
    chart('tau', [{name: 'planned', label: 'planned', hue: 1, dash: [2, 3]},
        {name: 'tau', label: 'so far', hue: 0}], {least: 0, unit: 'temperature'});
    const tau = Number.isFinite(p.tau) ? p.tau.toFixed(2) : '–', plan = now.history.planned;
    $('tau').hidden = !plan;
    $('tau').setAttribute('aria-label', `Temperature: ${tau}` + (plan
        ? `; planned: ${plan.y[0]} to ${plan.y[40].toFixed(2)} at step ${plan.x[40]}` : ''));
    const ms = rate => rate ? (1000 / rate).toFixed(1) : '–';
    const [before, after] = p.probabilities ? [now.rate, 0] : [now.before, now.rate];
    $('n-tau').textContent = tau;
    $('n-pattern').textContent = found;
    $('n-search').textContent = ms(before);
    $('n-only').textContent = ms(after);
    $('derive').disabled = !p.probabilities;
    if (before && after)
        $('derive-say').textContent = `Trains only ${found}, at ${after.toFixed(1)} steps/s: ` +
            `${(after / before).toFixed(1)} times the speed of the search, as measured here.`;
}


// >>progress

// Steps per second: the median of the last slices, which other work disturbs least.
function rate(n, took) {
    if (!n || !took) return;
    now.rates = (now.rates || []).slice(-20).concat(1000 * n / took);
    now.rate = now.rates.slice().sort((a, b) => a - b)[now.rates.length >> 1];
}

function record(p) {
    const first = p.steps - p.losses.length;
    p.losses.forEach((v, i) => add('loss', first + i + 1, v / Math.LN2));
    if (p.heldOut !== undefined) add('held', p.steps, p.heldOut);
    if (p.spans)
        p.spans.spans.forEach((v, i) => add(
            `span${Math.floor(i / p.spans.heads)}.${i % p.spans.heads}`, p.steps, v));
    if (p.memories) p.memories.layers.forEach((m, l) => add('lost' + l, p.steps, m.error));
    add('tau', p.steps, p.tau);
    rate(p.losses.length, p.took);
    now.spans = p.spans;
}

let drawn = 0, late = 0;

// Draws at most four times a second (with reduced motion once), and asks for the views of
// a panel only while it is on the screen.
function progress(p) {
    record(p);
    now.last = p;
    const wait = (still.matches ? 1000 : 250) - (performance.now() - drawn);
    clearTimeout(late);
    if (wait > 0) late = setTimeout(draw, wait);
    else draw();
}

const seen = new Set();
const watch = new IntersectionObserver(all => all.forEach(e => {
    if (e.isIntersecting) seen.add(e.target.id);
    else seen.delete(e.target.id);
    if (e.isIntersecting && now.last && !now.running) views();
}));
document.querySelectorAll('#panels .card').forEach(c => watch.observe(c));

function draw() {
    const p = now.last;
    if (!p) return;
    drawn = performance.now();
    $('n-steps').textContent = p.steps;
    $('n-speed').textContent = now.rate ? now.rate.toFixed(1) : '–';
    $('n-bytes').textContent = Math.round(p.bytes / 1e6);
    drawLoss();
    if (now.family === 'attn_span') drawSpans(p.spans);
    if (now.family === 'compressive') drawLost(p.memories);
    if (now.family === 'par') drawSearch(p);
    views();
}

let viewing = false;
async function views() {
    if (viewing) return;
    viewing = true;
    const family = now.family, take = {'panel-sample': takeSample};
    if (family === 'attn_span') take['panel-mask'] = takeMask;
    if (family === 'sru') take['panel-gates'] = takeGates;
    if (family === 'compressive') take['panel-memory'] = takeMemory;
    try {
        for (const id of Object.keys(take))
            if (seen.has(id) && now.family === family) await take[id]();
    } catch (e) {
        fail(e.message);
    }
    viewing = false;
}

function setRunning(on) {
    now.running = on;
    const begun = now.last && now.last.steps ? 'Continue' : 'Start';
    $('start').textContent = on ? 'Pause' : begun;
    $('step').disabled = on;
    say();
}

function say() {
    const size = now.parameters ? `${Math.round(now.parameters / 1000)} thousand parameters` : '';
    const paused = now.last && now.last.steps ? `Paused at step ${now.last.steps}` : 'Ready';
    const doing = now.running ? 'Training' : paused;
    $('status').textContent = `${doing}. ${$('family').selectedOptions[0].textContent}, ${size}, ` +
        `on ${Math.round(now.text.length / 1000)} kB of text` +
        `${now.threads > 1 ? `, ${now.threads} threads` : ''}. ${now.note || ''}`;
}


// >>actions

// Shows a model that was opened.
function opened(p) {
    Object.assign(now, {config: p.config, parameters: p.parameters, last: p, at: -1, query: -1,
        cell: null, rates: [], rate: 0, gates: null, map: null});
    document.querySelectorAll('[data-family]').forEach(e => {
        e.hidden = e.dataset.family !== now.family;
    });
    const layers = p.config.nlayers, fill = (id, names) => {
        $(id).replaceChildren(...names.map(([value, text]) => new Option(text, value)));
    };
    const numbers = (n, what) => Array.from({length: n}, (_, i) => [i, `${what}${i + 1}`]);
    fill('gates-layer', numbers(layers, ''));
    fill('memory-layer', numbers(layers, ''));
    fill('memory-head', numbers(p.config.nheads || 1, ''));
    fill('head', numbers(layers, '').flatMap(([l]) => numbers(p.config.nheads || 1, '')
        .map(([h]) => [`${l}.${h}`, `layer ${l + 1}, head ${h + 1}`])));
    $('memory').replaceChildren();
    $('sample').replaceChildren();
    $('blocks').replaceChildren();
    if (p.spans) showSliders();
    if (p.probabilities) now.history.planned = p.planned;
    record(p);
    setRunning(false);
    for (const id of ['start', 'reset', 'save']) $(id).disabled = false;
    draw();
}

function showSliders() {
    const loss = now.config['adapt-span-loss'];
    $('penalty').value = loss > 0 ? Math.round(10 * Math.log10(loss / 1e-6)) : 0;
    $('ramp').value = now.config['adapt-span-ramp'];
    $('o-penalty').textContent = loss.toExponential(0);
    $('o-ramp').textContent = now.config['adapt-span-ramp'];
}

async function fresh() {
    const family = $('family').value;
    const p = await ask('open', {metadata: data.models[family][Number($('size').value)]});
    Object.assign(now, {family, history: {}, before: null, note: ''});
    $('derive-say').textContent = '';
    opened(p);
}

// Begins a new model with a text. If that fails, the old text and model remain.
async function setText(bytes, name) {
    const old = now.text, oldName = now.name;
    const use = async (text, called) => {
        await ask('text', text);
        [now.text, now.name] = [text, called];
        $('text').querySelector('[value=own]').hidden = called !== 'own';
        $('text').value = called;
    };
    await use(bytes, name);
    try {
        await fresh();
    } catch (e) {
        if (old) await use(old, oldName);
        throw e;
    }
}

const giveText = (bytes, name) => act(() => setText(bytes, name));

async function load(bytes) {
    const p = await ask('open', {bytes}), name = {attn_span: 1, sru: 1, compressive: 1, par: 1};
    const header = new DataView(bytes.buffer).getBigUint64(0, true);
    const meta = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + Number(header))));
    const family = meta.__metadata__['model.family'];
    if (name[family]) $('family').value = now.family = family;
    Object.assign(now, {history: {}, before: null});
    now.note = {'other text': 'The checkpoint was trained on another text; it continues on ' +
        'this one, from its beginning.', 'no state of training': 'The file has a model only; ' +
        'training starts with a new optimiser.'}[p.status] || '';
    opened(p);
}

function download(bytes, name) {
    const a = document.createElement('a');
    a.href = URL.createObjectURL(new Blob([bytes], {type: 'application/octet-stream'}));
    a.download = name;
    a.click();
    setTimeout(() => URL.revokeObjectURL(a.href), 10000);
}

const fileBytes = async f => new Uint8Array(await f.arrayBuffer());
const takeFile = f => act(async () => {
    if (!f) return;
    const bytes = await fileBytes(f);
    if (f.name.endsWith('.safetensors')) await load(bytes);
    else await setText(bytes, 'own');
});

function listen() {
    const on = (id, event, f) => $(id).addEventListener(event, f);
    on('start', 'click', () => act(async () => {
        if (now.running) await ask('pause');
        else await ask('start', Number($('speed').value));
        setRunning(!now.running);
    }));
    on('step', 'click', () => act(() => ask('step', 1).then(say)));
    on('reset', 'click', () => act(fresh));
    on('speed', 'change', () => ask('speed', Number($('speed').value)));
    on('family', 'change', () => act(fresh));
    on('size', 'change', () => act(fresh));
    on('text', 'change', () => act(async () => {
        if ($('text').value !== 'own')
            await setText(await shipped($('text').value), $('text').value);
    }));
    on('save', 'click', () => act(async () =>
        download(await ask('save'), `seqtx-${now.family}-${now.last.steps}.safetensors`)));
    on('download-text', 'click', () => download(now.text, 'text.txt'));
    on('load', 'click', () => $('load-file').click());
    on('load-file', 'change', async e => {
        await takeFile(e.target.files[0]);
        e.target.value = '';
    });
    on('pick', 'click', e => {
        e.preventDefault();
        $('pick-file').click();
    });
    on('pick-file', 'change', async e => {
        await takeFile(e.target.files[0]);
        e.target.value = '';
    });
    on('use', 'click', () => giveText(new TextEncoder().encode($('own').value), 'own'));
    addEventListener('dragover', e => {
        e.preventDefault();
        document.body.classList.add('drop');
    });
    addEventListener('dragleave', () => document.body.classList.remove('drop'));
    addEventListener('drop', e => {
        e.preventDefault();
        document.body.classList.remove('drop');
        takeFile(e.dataTransfer.files[0]);
    });

    on('prompt', 'input', () => { now.at = -1; views(); });
    on('temperature', 'input', () => {
        $('o-temperature').textContent = $('temperature').value;
        views();
    });
    on('again', 'click', () => { seed++; now.at = -1; views(); });
    choosable('sample', () => now.at < 0 ? now.given : now.at, i => { now.at = i; drawSample(); });
    const slide = () => act(async () => {
        const loss = penalty(Number($('penalty').value)), ramp = Number($('ramp').value);
        await ask('setSpan', [loss, ramp]);
        now.config['adapt-span-loss'] = loss;
        now.config['adapt-span-ramp'] = ramp;
        $('o-penalty').textContent = loss.toExponential(0);
        $('o-ramp').textContent = ramp;
        views();
    });
    on('penalty', 'input', slide);
    on('ramp', 'input', slide);
    on('head', 'change', views);
    choosable('attention', () => $('attention').children.length - now.map.queries +
        (now.query < 0 ? now.map.queries - 1 : now.query), i => {
        now.query = Math.max(0, i - ($('attention').children.length - now.map.queries));
        drawMask(now.map);
    });
    for (const id of ['gates-layer', 'memory-layer', 'memory-head']) on(id, 'change', views);
    on('gates-what', 'change', drawGates);
    on('gates', 'pointermove', e => {
        const {left, top, W, H, T, U} = now.grid || {};
        if (T) chooseCell(Math.floor((e.offsetX - left) / W * T),
            Math.floor((e.offsetY - top) / H * U));
    });
    on('gates', 'keydown', e => {
        const d = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1],
            ArrowDown: [0, 1]}[e.key];
        if (!d || !now.grid) return;
        e.preventDefault();
        const c = now.cell || {t: 8, k: 0};
        chooseCell(c.t + d[0], c.k + d[1]);
    });
    on('derive', 'click', () => act(async () => {
        now.before = now.rate;
        const p = await ask('derive'), {loss, tau, planned} = now.history;
        now.history = {search: loss, tau, planned};
        opened(p);
        $('derive-say').textContent = `Trains only ${p.found} now, with the weights of the ` +
            'search. Press Start.';
    }));
    addEventListener('resize', () => { draw(); drawGates(); });
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
        draw();
        drawGates();
    });
}

async function begin() {
    listen();
    const wasm = await unpacked(data.wasm);
    now.threads = self.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency) : 1;
    const base = now.threads > 1 ? location.href : '';
    $('version').textContent = await ask('load', {wasm, base, threads: now.threads});
    await setText(await shipped('english'), 'english');
}

begin().catch(e => fail(e.message));
