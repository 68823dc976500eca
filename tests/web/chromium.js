// chromium.js - a headless Chromium, driven by its DevTools protocol over a pipe. Needs no
// packages.
'use strict';
const {spawn} = require('child_process');
const fs = require('fs'), os = require('os'), path = require('path');

const PATIENCE = 600000;    // ms: only ends a hang

async function chromium(program) {
    const dir = fs.mkdtempSync(path.join(os.tmpdir(), 'seqtx-chromium-'));
    const browser = spawn(program, ['--headless=new', '--no-sandbox', '--disable-gpu',
        '--remote-debugging-pipe', '--disable-dev-shm-usage', '--no-first-run',
        '--force-color-profile=srgb', '--user-data-dir=' + dir, 'about:blank'],
        {stdio: ['ignore', 'ignore', 'ignore', 'pipe', 'pipe']});
    const [, , , to, from] = browser.stdio, waiting = new Map(), listeners = [];
    let text = Buffer.alloc(0), calls = 0;

    browser.on('exit', () => {
        for (const w of waiting.values()) w.reject(new Error(program + ' ended'));
    });
    from.on('data', piece => {
        text = Buffer.concat([text, piece]);
        for (let end; (end = text.indexOf(0)) >= 0; text = text.subarray(end + 1)) {
            const m = JSON.parse(text.toString('utf8', 0, end));
            const w = waiting.get(m.id);
            if (!w) {
                for (const l of listeners) l(m.method, m.params);
                continue;
            }
            waiting.delete(m.id);
            if (m.error) w.reject(new Error(m.error.message));
            else w.resolve(m.result);
        }
    });
    const send = (method, params, sessionId) => new Promise((resolve, reject) => {
        waiting.set(++calls, {resolve, reject});
        to.write(JSON.stringify({id: calls, method, params, sessionId}) + '\0');
    });

    const {targetId} = await send('Target.createTarget', {url: 'about:blank'});
    const {sessionId} = await send('Target.attachToTarget', {targetId, flatten: true});
    const call = (method, params) => send(method, params || {}, sessionId);
    const errors = [];
    for (const domain of ['Page', 'Runtime', 'Log', 'DOM']) await call(domain + '.enable');
    listeners.push((method, p) => {
        if (method === 'Runtime.exceptionThrown')
            errors.push(p.exceptionDetails.exception ? p.exceptionDetails.exception.description
                : p.exceptionDetails.text);
        if (method === 'Runtime.consoleAPICalled' && /error|warning|assert/.test(p.type))
            errors.push(p.args.map(a => a.value || a.description).join(' '));
        if (method === 'Log.entryAdded' && /error|warning/.test(p.entry.level))
            errors.push(p.entry.text + ' ' + (p.entry.url || ''));
    });

    const page = {
        call, errors,
        // The value of an expression in the page, which can be a promise.
        async value(expression) {
            const r = await call('Runtime.evaluate',
                {expression, awaitPromise: true, returnByValue: true});
            if (r.exceptionDetails)
                throw new Error(expression + ': ' +
                    (r.exceptionDetails.exception || {}).description);
            return r.result.value;
        },
        async until(expression) {
            for (const end = Date.now() + PATIENCE; Date.now() < end;) {
                const v = await page.value(expression);
                if (v) return v;
                await new Promise(r => setTimeout(r, 50));
            }
            throw new Error('waited in vain for ' + expression + '; ' +
                await page.value('document.body.innerText.slice(0, 2000)'));
        },
        async open(url) {
            const loaded = new Promise(r => {
                const l = method => {
                    if (method !== 'Page.loadEventFired') return;
                    listeners.splice(listeners.indexOf(l), 1);
                    r();
                };
                listeners.push(l);
            });
            await call('Page.navigate', {url});
            await loaded;
        },
        look: (width, height, dark) => Promise.all([
            call('Emulation.setDeviceMetricsOverride', {width, height, mobile: width < 600,
                deviceScaleFactor: width < 600 ? 2 : 1}),
            call('Emulation.setEmulatedMedia', {features: [
                {name: 'prefers-color-scheme', value: dark ? 'dark' : 'light'},
                {name: 'prefers-reduced-motion', value: 'reduce'}]})]),
        async picture(file, clip) {
            const {data} = await call('Page.captureScreenshot',
                Object.assign({format: 'png', captureBeyondViewport: true}, clip && {clip}));
            fs.writeFileSync(file, Buffer.from(data, 'base64'));
        },
        async file(selector, name) {
            const {root} = await call('DOM.getDocument');
            const {nodeId} = await call('DOM.querySelector', {nodeId: root.nodeId, selector});
            await call('DOM.setFileInputFiles', {nodeId, files: [name]});
        },
        downloads: to => send('Browser.setDownloadBehavior',
            {behavior: 'allow', downloadPath: to}),
        async close() {
            const ended = new Promise(r => browser.on('exit', r));
            await send('Browser.close').catch(() => {});
            await ended;
            fs.rmSync(dir, {recursive: true, force: true, maxRetries: 5});
        }
    };
    return page;
}

module.exports = {chromium};
