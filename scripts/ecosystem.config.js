// Keeps the processes running under pm2:
//   pm2 start scripts/ecosystem.config.js --only quasar-miner && pm2 save
// Several miners, one for each file .env.0, .env.1 and so on, each on the GPU of that number:
//   pm2 start scripts/ecosystem.config.js --only quasar-miner-0,quasar-miner-1 && pm2 save
const fs = require("fs");
const path = require("path");

const root = path.resolve(__dirname, "..");

// A settings file that exists now is named, so that its loss becomes an error: without a .env, the
// miner would run its trial and the API would open another database.
const file = path.resolve(root, process.env.ENV_FILE || ".env");
const settings = fs.existsSync(file) ? { ENV_FILE: file } : {};

const app = (name, script) => ({
  name,
  env: settings,
  script: path.join(root, script),
  cwd: root,
  interpreter: "none", // the script has its own first line and becomes the Python process
  stop_exit_codes: [78], // no restart: the operator must correct a setting, the wallet or the lock
  // After ten runs of less than a minute each, pm2 shows "errored". There is no restart delay, because
  // with one, pm2 shows "waiting restart" also for processes that it will not restart.
  min_uptime: 60000,
  max_restarts: 10,
  kill_timeout: 15000, // milliseconds from SIGINT to SIGKILL: time to write the journal
  merge_logs: true, // one pair of files in pm2's own folder; pm2-logrotate bounds them
  time: false, // the log's lines contain the time already
});

// The numbers of the settings files of several miners.
const numbers = fs.readdirSync(root).flatMap((name) => name.match(/^\.env\.(\d+)$/)?.[1] ?? []);

const miner = (number) => ({
  ...app(`quasar-miner-${number}`, "START_MINER.sh"),
  args: ["--env-file", `.env.${number}`, "--state-dir", `state-${number}`],
  env: { CUDA_VISIBLE_DEVICES: number },
});

module.exports = {
  apps: [
    app("quasar-miner", "START_MINER.sh"),
    ...numbers.sort().map(miner),
    app("quasar-server", "START_SERVER.sh"),
    app("quasar-validator", "START_VALIDATOR.sh"),
    app("quasar-inference", "START_MINER_INFERENCE.sh"),
  ],
};
