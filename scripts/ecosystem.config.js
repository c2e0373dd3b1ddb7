// Keeps the miner running under pm2: pm2 start scripts/ecosystem.config.js && pm2 save
const path = require("path");

const root = path.resolve(__dirname, "..");

module.exports = {
  apps: [
    {
      name: "quasar-miner",
      script: path.join(root, "START_MINER.sh"),
      cwd: root,
      interpreter: "none", // the script has its own first line and becomes the Python process
      stop_exit_codes: [78], // a setting, the wallet or the lock needs a person: no restart
      // Ten ends within a minute each are a loop: pm2 then shows "errored". No restart delay:
      // with one, pm2 shows "waiting restart" also for what it will not restart.
      min_uptime: 60000,
      max_restarts: 10,
      kill_timeout: 15000, // milliseconds from SIGINT to SIGKILL: time to write the journal
      merge_logs: true, // one pair of files in pm2's own folder
      time: false, // the lines carry their own time
    },
  ],
};
