// build.js - makes the page: one file with its style, scripts, WebAssembly, texts, the
// options of the models and excerpts of the headers' manuals. Run by `make web`:
//     node build.js OUT WASM TRAINERS ENGLISH
// TRAINERS is the directory of the native trainers. Each model of the page is described by
// the checkpoint of a trainer that ran for one step, so that the trainers accept the
// page's checkpoints.
'use strict';
const fs = require('fs'), os = require('os'), path = require('path'), zlib = require('zlib');
const {execFileSync} = require('child_process');
const [out, wasm, trainers, english] = process.argv.slice(2);
const here = __dirname, root = path.join(here, '..', '..');
const TEXT = 300000;        // bytes of a text that ships with the page

const ALL = '--steps 1 --schedule constant --lr-warmup 20 --dropout 0 --batch-split 1 ' +
    '--batch-sz 8 --streams 8 --grad-clip 1 --precision f32 --optim muon --data text.txt';
const SPAN = '--block-sz 64 --lr 0.004 --adapt-span-init 0.15 --adapt-span-loss 0.000002 ' +
    '--adapt-span-ramp 16 --nheads 4';
const SRU = '--cell sru --proj-sz 0 --block-sz 64 --lr 0.01 --highway-bias -1';
const COMP = '--lr 0.004 --block-sz 32 --mem 32 --cmem 32 --ratio 4 --memory-layers all ' +
    '--nheads 4';
const PAR = '--pattern search --block-sz 32 --mem 32 --lr 0.004 --nheads 4 --arch-from 60 ' +
    '--arch-lr 0.03 --gate-eval soft --tau-start 1 --tau-end 0.2 --tau-steps 800 --latency hinge ' +
    '--latency-target 0.65 --latency-table 3,2';
const FAMILIES = {
    attn_span: [SPAN, ['--nlayers 2 --hid-sz 48 --attn-span 128',
        '--nlayers 3 --hid-sz 64 --attn-span 256', '--nlayers 4 --hid-sz 128 --attn-span 512']],
    sru: [SRU, ['--nlayers 2 --hid-sz 64', '--nlayers 3 --hid-sz 128',
        '--nlayers 4 --hid-sz 256']],
    compressive: [COMP, ['--nlayers 2 --hid-sz 48', '--nlayers 3 --hid-sz 64',
        '--nlayers 4 --hid-sz 128']],
    par: [PAR, ['--nlayers 4 --hid-sz 48', '--nlayers 6 --hid-sz 64',
        '--nlayers 8 --hid-sz 128']]
};

// The metadata that describe a model: its desc and the trainer's options.
function template(family, options, dir) {
    const file = path.join(dir, 'one.safetensors');
    const args = [ALL, options, '--checkpoint', file].join(' ').split(' ');
    fs.rmSync(file, {force: true});
    try {
        execFileSync(path.resolve(trainers, 'train_' + family), args, {cwd: dir, stdio: 'pipe'});
    } catch (e) {
        throw new Error('train_' + family + ' ' + args.join(' ') + ':\n' + e.stderr);
    }
    const bytes = fs.readFileSync(file), n = Number(bytes.readBigUInt64LE(0));
    const all = JSON.parse(bytes.toString('utf8', 8, 8 + n)).__metadata__, kept = {};
    for (const key of Object.keys(all))
        if (/^(config$|model\.)/.test(key)) kept[key] = all[key];
    return kept;
}

// <excerpt header=".." from=".." lines="..">: lines of a header, from the first line that
// contains a text. It is an error if the header no longer has it.
function excerpt(whole, header, from, lines) {
    const all = fs.readFileSync(path.join(root, header), 'utf8').split('\n');
    const first = all.findIndex(line => line.includes(from));
    if (first < 0) throw new Error(`page.html: ${header} has no line with "${from}"`);
    const text = all.slice(first, first + Number(lines)).join('\n')
        .replace(/&/g, '&amp;').replace(/</g, '&lt;');
    return `<details class="header"><summary>${header}, line ${first + 1}</summary>` +
        `<pre tabindex="0">${text}</pre></details>`;
}

const packed = bytes => zlib.gzipSync(bytes, {level: 9}).toString('base64');

function main() {
    const dir = fs.mkdtempSync(path.join(os.tmpdir(), 'seqtx-web-'));
    const read = name => fs.readFileSync(path.join(here, name), 'utf8');
    const code = ['loops', 'sums', 'maths', 'tape'].map(n => `src/core/${n}.h`)
        .concat(['elementwise', 'softmax', 'layernorm', 'linear', 'attention_fwd',
            'attention_bwd', 'cross_entropy'].map(n => `src/ops/${n}.h`));
    const text = {
        english: fs.readFileSync(english).subarray(0, TEXT),
        c: Buffer.concat(code.map(f => fs.readFileSync(path.join(root, f)))).subarray(0, TEXT)
    };
    const models = {};
    fs.writeFileSync(path.join(dir, 'text.txt'), text.english);
    for (const family of Object.keys(FAMILIES)) {
        const [common, sizes] = FAMILIES[family];
        models[family] = sizes.map(size => template(family, common + ' ' + size, dir));
    }
    fs.rmSync(dir, {recursive: true});
    const data = {
        models, wasm: packed(fs.readFileSync(wasm)),
        texts: {english: packed(text.english), c: packed(text.c)}
    };
    const parts = {
        style: read('page.css'), page: read('page.js'),
        worker: read('seqtx.js') + read('worker.js'),
        reads: '<p class="key">The model reads held-out text and then, in bold, what you ' +
            'typed under <a href="#prompt">What it writes</a>.</p>',
        data: JSON.stringify(data).replace(/</g, '\\u003c')
    };
    const page = read('page.html')
        .replace(/<excerpt header="(.*?)"\sfrom="(.*?)"\slines="(.*?)">/g, excerpt)
        .replace(/\{\{(\w+)\}\}/g, (whole, name) => parts[name]);
    fs.writeFileSync(out, page);
    // for pages of one's own (docs/web.md)
    const beside = name => path.join(path.dirname(out), name);
    fs.writeFileSync(beside('models.json'), JSON.stringify(models));
    fs.writeFileSync(beside('text.txt'), text.english);
    fs.copyFileSync(path.join(here, 'seqtx.js'), beside('seqtx.js'));
}

main();
