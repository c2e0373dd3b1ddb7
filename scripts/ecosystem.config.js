// Keeps the processes running under pm2:
//   pm2 start scripts/ecosystem.config.js --only quasar-miner && pm2 save
const path = require("path");

const root = path.resolve(__dirname, "..");

const app = (name, script) => ({
  name,
  script: path.join(root, script),
  cwd: root,
  interpreter: "none", // the script has its own first line and becomes the Python process
  stop_exit_codes: [78], // a setting, the wallet or the lock needs a person: no restart
  // Ten ends within a minute each are a loop: pm2 then shows "errored". No restart delay:
  // with one, pm2 shows "waiting restart" also for what it will not restart.
  min_uptime: 60000,
  max_restarts: 10,
  kill_timeout: 15000, // milliseconds from SIGINT to SIGKILL: time to write the journal
  merge_logs: true, // one pair of files in pm2's own folder; pm2-logrotate bounds them
  time: false, // the lines carry their own time
});

module.exports = {
  apps: [
    app("quasar-miner", "START_MINER.sh"),
    app("quasar-server", "START_SERVER.sh"),
    app("quasar-validator", "START_VALIDATOR.sh"),
    app("quasar-inference", "START_MINER_INFERENCE.sh"),
  ],
};
