// browser.js - the page in a real browser: headless Chromium opens it as a file and from a
// local server. Each family trains until its loss is below a bound, pauses, samples, saves,
// reloads, loads its checkpoint and continues to the same loss; the native trainer
// continues it, too. Prints "N passed, N failed".
//     node browser.js PAGE TRAINERS [--pictures DIR]
// --pictures also takes a picture of all panels at two widths, light and dark.
'use strict';
const {chromium} = require('./chromium.js');
const {execFileSync} = require('child_process');
const fs = require('fs'), http = require('http'), os = require('os'), path = require('path');
const [file, trainers, , pictures] = process.argv.slice(2);

const BOUND = 4.4, STEPS = 80;      // bits per byte, which a family reaches within STEPS
const LEAST = {par: 64};            // steps, after which the gates learn
const FAMILIES = ['attn_span', 'sru', 'compressive', 'par'];
let passed = 0, failed = 0;

function check(ok, what) {
    if (ok) passed++;
    else failed++;
    if (!ok) console.log('FAILED: ' + what);
    return ok;
}

const click = (page, id) => page.value(`$('${id}').click()`);
const idle = (page, what) => page.until(`!now.busy && now.last && (${what})`);
const loss = page => page.value('now.history.loss.y[now.history.loss.y.length - 1]');

async function choose(page, id, value) {
    await page.value(`$('${id}').value = ${JSON.stringify(value)};
        $('${id}').dispatchEvent(new Event('change'))`);
}

async function slide(page, id, value) {
    await page.value(`$('${id}').value = ${value}; $('${id}').dispatchEvent(new Event('input'))`);
    await idle(page, 'true');
}

async function ready(page, url) {
    await page.open(url);
    await idle(page, "!$('start').disabled");
}

// One step, and the loss of it.
async function step(page) {
    const before = await page.value('now.last.steps');
    await click(page, 'step');
    await idle(page, `now.last.steps === ${before + 1}`);
    return loss(page);
}

// The text of a panel ends with what the reader types, in bold, and what the model computes
// from it is shown. box: its characters are elements; otherwise it is a canvas. state: an
// expression for what is shown at the last character.
async function reads(page, box, state, where) {
    const values = [];
    for (const typed of ['an old hat', 'a new idea']) {
        await page.value(`$('prompt').value = ${JSON.stringify(typed)};
            $('prompt').dispatchEvent(new Event('input'))`);
        if (box) {
            await page.until(`$('${box}').textContent.replaceAll('␣', ' ').endsWith('${typed}')`);
            check(await page.value(`Array.from($('${box}').children).map(e =>
                getComputedStyle(e).fontWeight === '700' ? e.textContent : '').join('')`) ===
                (box === 'rows-3' ? typed.replaceAll(' ', '␣') : typed),
                `${where}: what the reader typed is bold in ${box}`);
        } else {
            await page.until(`characters(now.gates.bytes).join('').endsWith('${typed}')`);
            check(await page.value('now.gates.tokens - now.gates.typed') === typed.length,
                `${where}: what the reader typed is bold`);
        }
        values.push(await page.value(state));
    }
    check(values[0] !== values[1], `${where}: what the reader types changes what is shown`);
}

// What each family shows, after some steps.
async function panels(page, family, where) {
    const says = id => page.until(`$('${id}').textContent.length > 20 && $('${id}').textContent`);
    const show = id => page.value(
        `$('${id}').scrollIntoView(); new Promise(r => setTimeout(r, 300))`);
    await show('panel-sample');
    await page.until('now.sample.length > 200');
    await page.value(`$('sample').focus()`);
    for (const key of ['ArrowRight', 'ArrowRight'])
        await page.call('Input.dispatchKeyEvent', {type: 'keyDown', key, code: key});
    check(await page.value("$('expected').children.length") === 10,
        `${where}: ten characters that the model expected`);
    const shares = await page.value('now.sample[now.at].likely.map(l => l.p)');
    check(Math.abs(shares.reduce((a, b) => a + b, 0) - 1) < 0.6 && shares[0] >= shares[1],
        `${where}: their probabilities`);
    if (family === 'attn_span') {
        await show('panel-mask');
        await says('mask-say');
        const sum = await page.value('Array.from(now.map.weight.subarray(0, now.map.keys))' +
            '.reduce((a, b) => a + b)');
        check(Math.abs(sum - 1) < 1e-5, `${where}: attention weights sum to 1, got ${sum}`);
        await reads(page, 'attention', 'Array.from(now.map.weight.slice(-10)).join()', where);
        check(await page.value("$('mask').querySelectorAll('.given').length") === 10,
            `${where}: what the reader typed is bold in the mask`);
        await slide(page, 'penalty', 40);
        await slide(page, 'ramp', 5);
        const before = await page.value('now.last.spans.spans.reduce((a, b) => a + b)');
        for (let i = 0; i < 6; i++) await step(page);
        const after = await page.value('now.last.spans.spans.reduce((a, b) => a + b)');
        check(after < before, `${where}: a larger penalty shortens the spans at once: ` +
            `${before} to ${after}`);
        check(await page.value("$('o-ramp').textContent") === '5', `${where}: the ramp`);
    }
    if (family === 'sru') {
        await show('panel-gates');
        await says('gates-say');
        check(await page.value('now.gates.values.every(v => Number.isFinite(v))') &&
            await page.value('now.gates.values.slice(0, now.gates.units)' +
                '.every(f => f > 0 && f < 1)'), `${where}: forget gates are in (0,1)`);
        await reads(page, '', 'Array.from(now.gates.values.slice(-now.gates.units)).join()', where);
    }
    if (family === 'compressive') {
        await show('panel-memory');
        await says('memory-say');
        check(await page.value("$('rows-1').children.length") > 0,
            `${where}: rows of the compressed memory`);
        await reads(page, 'rows-3', 'Array.from(now.map.weight.slice(-10)).join()', where);
        const error = await page.value('now.last.memories.layers[0].error');
        check(error > 0 && error < 1.5, `${where}: what compression lost, got ${error}`);
    }
    if (family === 'par')
        check(await page.value("$('blocks').children.length") === 4 &&
            /^[sfi]{4}$/.test(await page.value("$('n-pattern').textContent")),
            `${where}: four blocks and a pattern`);
}

async function train(page, url, family, dir, where) {
    await choose(page, 'family', family);
    await idle(page, `now.family === '${family}' && now.last.steps === 0`);
    await click(page, 'start');
    await page.until(`now.last.steps >= ${LEAST[family] || 1} && (now.last.steps >= ${STEPS} ||
        Math.min(...now.history.loss.y.slice(-5)) < ${BOUND})`);
    await click(page, 'start');
    await idle(page, '!now.running');
    const reached = await page.value('Math.min(...now.history.loss.y.slice(-5))');
    check(reached < BOUND, `${where}: the loss falls below ${BOUND}, got ${reached}`);
    const paused = await page.value("ask('pause')");
    check(await page.value("new Promise(r => setTimeout(r, 300)).then(() => ask('pause'))") ===
        paused, `${where}: pauses`);
    await page.value(`now.last.steps = ${paused}`);
    await panels(page, family, where);

    const expected = await resume(page, url, family, dir, where);
    console.log(`${where}: ${reached.toFixed(3)} bits per byte; next ${expected.toFixed(4)}`);
}

// The checkpoint of the model continues to the same loss, in the page and in the trainer.
// Returns this loss.
async function resume(page, url, family, dir, where) {
    const steps = await page.value("ask('pause')"), name = `seqtx-${family}-${steps}.safetensors`;
    const saved = path.join(dir, name);
    fs.rmSync(saved, {force: true});
    await click(page, 'save');
    while (!fs.existsSync(saved) || !fs.statSync(saved).size)
        await new Promise(r => setTimeout(r, 50));
    const expected = await step(page);
    await ready(page, url);
    await page.file('#load-file', saved);
    await idle(page, `now.family === '${family}' && now.last.steps === ${steps}`);
    check(await page.value("$('error').hidden"), `${where}: the checkpoint loads`);
    const got = await step(page);
    check(got === expected, `${where}: continues to the same loss: ${expected}, got ${got}`);

    const log = path.join(dir, 'log.jsonl');
    fs.rmSync(log, {force: true});
    execFileSync(path.resolve(trainers, 'train_' + family), ['--checkpoint', saved, '--data',
        path.join(dir, 'text.txt'), '--steps', String(steps + 1), '--log-every', '1', '--log',
        log], {stdio: 'pipe'});
    const record = fs.readFileSync(log, 'utf8').split('\n').filter(l => l.includes('"loss"'));
    const native = JSON.parse(record[0]).loss / Math.LN2;
    check(Math.abs(native - expected) < 1e-3,
        `${where}: train_${family} continues to ${native}, expected ${expected}`);
    return expected;
}

// "Train only that" after a search whose gates have learned for some steps.
async function derive(page, url, dir, where) {
    const SEARCH = 300, ONLY = 100, said = id => page.value(`$('${id}').textContent`);
    const run = async n => {
        await page.value(`ask('step', ${n}).then(() => draw())`);
        await idle(page, `now.last.steps === ${n} && $('n-steps').textContent === '${n}'`);
    };
    await choose(page, 'family', 'par');
    await idle(page, "now.family === 'par' && now.last.steps === 0");
    await run(SEARCH);
    const {tau, planned} = await page.value('now.history'), end = planned.x.length - 1;
    const at = s => planned.y[0] * (planned.y[end] / planned.y[0]) ** (s / planned.x[end]);
    check(planned.y[0] === 1 && planned.x[end] > SEARCH && tau.x.every((s, i) =>
        Math.abs(tau.y[i] - at(s)) < 1e-9) && tau.x[tau.x.length - 1] === SEARCH &&
        planned.x.every((s, i) => Math.abs(planned.y[i] - at(s)) < 1e-9),
        `${where}: the temperature so far and as planned`);
    const found = await said('n-pattern');
    const search = await page.value('(1000 / now.rate).toFixed(1)');
    check(await said('n-search') === search && await said('n-only') === '–',
        `${where}: measures the step of the search`);
    await click(page, 'derive');
    await idle(page, '!now.last.probabilities && !now.last.steps');
    await run(ONLY);
    check(await said('n-pattern') === found && await page.value('now.config.pattern') === found,
        `${where}: trains the order found, ${found}`);
    const only = await page.value('now.rate');
    check(await said('n-search') === search && await said('n-only') === (1000 / only).toFixed(1) &&
        (await said('derive-say')).includes(`${found}, at ${only.toFixed(1)} steps/s`),
        `${where}: both measured speeds, got ${await said('derive-say')}`);
    const y = await page.value('now.history.loss.y'), mean = a => a.reduce((s, v) => s + v) / 20;
    const [first, last] = [mean(y.slice(0, 20)), mean(y.slice(-20))];
    check(y.length === ONLY && last < first - 0.1,
        `${where}: the loss of what it derived falls, from ${first} to ${last}`);
    await resume(page, url, 'par', dir, where + ', derived');
}

async function mistakes(page, dir, where) {
    const bad = path.join(dir, 'bad.safetensors');
    fs.writeFileSync(bad, 'no model');
    await page.file('#load-file', bad);
    await page.until("!$('error').hidden && !now.busy");
    check((await page.value("$('error').textContent")).includes('safetensors'),
        `${where}: says why a file does not load`);
    await page.value("giveText(new TextEncoder().encode('too short'), 'own')");
    await page.until("!now.busy && !$('error').hidden");
    check((await page.value("$('error').textContent")).length > 10,
        `${where}: shows the error of a text that is too short`);
    await page.value("$('own').value = 'abcdefgh '.repeat(4000)");
    await click(page, 'use');
    await idle(page, "now.text.length === 36000 && $('error').hidden");
    check(Number.isFinite(await step(page)), `${where}: trains on a pasted text`);
}

// The page of docs/web.md.
async function embedded(page, url, dir) {
    const text = fs.readFileSync(path.join(__dirname, '../../docs/web.md'), 'utf8');
    const html = /```html\n([^]*?)```/.exec(text)[1];
    fs.writeFileSync(path.join(dir, 'own.html'), html);
    check(html.trim().split('\n').length <= 20, 'docs/web.md: a page of at most 20 lines');
    await page.open(url + 'own.html');
    const said = await page.until("/^step [1-9]\\d+: /.test(out.textContent) && out.textContent");
    check(said.includes('The '), 'docs/web.md: the page trains and samples');
}

// With the headers that allow shared memory, the page has threads, and the same bits.
async function threads(page, urls) {
    const losses = [];
    for (const url of urls) {
        await ready(page, url);
        for (let i = 0; i < 4; i++) await step(page);
        losses.push(await page.value('now.history.loss.y.join()'));
    }
    check(await page.value("crossOriginIsolated && $('status').textContent.includes('threads')"),
        'http with headers: threads');
    check(losses[0] === losses[1], `threads: losses ${losses[1]}, expected ${losses[0]}`);
}

async function draw(page, url, to) {
    fs.mkdirSync(to, {recursive: true});
    for (const family of FAMILIES) {
        await page.look(1280, 900, false);
        await ready(page, url);
        await choose(page, 'family', family);
        await idle(page, `now.family === '${family}' && now.last.steps === 0`);
        for (let i = 0; i < 300; i += 5) await page.value("ask('step', 5).then(() => 0)");
        await page.value('setRunning(false)');
        for (const [width, dark] of [[1280, false], [1280, true], [390, false], [390, true]]) {
            await page.look(width, 900, dark);
            await page.look(width, await page.value('document.body.scrollHeight') + 20, dark);
            await page.value('new Promise(r => setTimeout(r, 500)).then(views)');
            await page.value('new Promise(r => setTimeout(r, 500))');
            await page.picture(path.join(to, `${family}-${width}${dark ? '-dark' : ''}.png`));
        }
    }
}

async function main() {
    const dir = fs.mkdtempSync(path.join(os.tmpdir(), 'seqtx-browser-'));
    const types = {html: 'text/html', js: 'text/javascript', wasm: 'application/wasm'};
    const serve = headers => http.createServer((q, r) => {
        const name = path.basename(q.url);
        const found = [path.dirname(file), dir].map(d => path.join(d, name)).find(fs.existsSync);
        const missing = name === 'favicon.ico' ? 204 : 404;
        r.writeHead(found ? 200 : missing, Object.assign({'Content-Type':
            types[name.split('.').pop()] || 'application/octet-stream'}, headers));
        r.end(found && fs.readFileSync(found));
    }).listen(0, '127.0.0.1');
    const server = serve({}), isolated = serve({'Cross-Origin-Opener-Policy': 'same-origin',
        'Cross-Origin-Embedder-Policy': 'require-corp'});
    const at = s => `http://127.0.0.1:${s.address().port}/`;
    const page = await chromium(process.env.CHROMIUM || 'chromium');
    try {
        const urls = ['file://' + path.resolve(file), at(server) + path.basename(file)];
        await page.downloads(dir);
        if (pictures) await draw(page, urls[0], pictures);
        for (const url of urls) {
            const where = url.slice(0, 4);
            await page.look(1280, 900, false);
            await ready(page, url);
            fs.writeFileSync(path.join(dir, 'text.txt'),
                Buffer.from(await page.value('Array.from(now.text)')));
            for (const family of FAMILIES)
                await train(page, url, family, dir, `${where} ${family}`);
            if (url === urls[0]) await derive(page, url, dir, where);
            await mistakes(page, dir, where);
            await page.look(390, 800, true);
            check(await page.value('document.documentElement.scrollWidth') <= 390,
                `${where}: fits a width of 390`);
            const unnamed = await page.value(`Array.from(document.querySelectorAll(
                'button, select, input, textarea, canvas, [role=group], [role=img]')).filter(e =>
                !e.textContent.trim() && !e.getAttribute('aria-label') && !(e.labels || []).length)
                .map(e => e.id).join()`);
            check(!unnamed, `${where}: every control has a name, except ${unnamed}`);
        }
        await threads(page, [urls[1], at(isolated) + path.basename(file)]);
        await embedded(page, at(server), dir);
        check(!page.errors.length, 'errors were logged: ' + page.errors.join('; '));
    } catch (e) {
        check(false, e.stack);
    } finally {
        await page.close();
        server.close();
        isolated.close();
        fs.rmSync(dir, {recursive: true, force: true});
    }
    console.log(`${passed} passed, ${failed} failed`);
    process.exitCode = failed ? 1 : 0;
}

main();
