// web.js - runs one model of the page in Node.js, or prints the arguments of native.c for
// it; see web.sh.
//     node web.js DIR FAMILY SIZE STEPS [WASM]
// With WASM: prints ms of processor time per step, and the last loss. Without: writes the
// model to DIR/model and prints the optimiser and the options.
'use strict';
const fs = require('fs'), path = require('path');
const [dir, family, size, steps, wasm] = process.argv.slice(2);
const {seqtx, seqtxHeader, seqtxNumbers} = require(path.resolve(dir, 'seqtx.js'));
const metadata = JSON.parse(fs.readFileSync(path.join(dir, 'models.json')))[family][size];

async function run() {
    const model = await seqtx(fs.readFileSync(wasm));
    let begin, loss;
    model.text(fs.readFileSync(path.join(dir, 'text.txt')));
    model.open({metadata});
    for (let step = -3; step < steps; step++) {
        if (step === 0) begin = process.cpuUsage().user;
        loss = model.step();
    }
    console.log(((process.cpuUsage().user - begin) / 1000 / steps).toFixed(3), loss.toFixed(6));
}

if (wasm) {
    run();
} else {
    const config = JSON.parse(metadata.config);
    fs.writeFileSync(path.join(dir, 'model'), seqtxHeader(metadata));
    console.log(config.optim, seqtxNumbers(config, 1).join(' '));
}
