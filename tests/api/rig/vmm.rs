//! The real command with an API socket, and its host resources.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::files::Files;
use crate::rig::client::{Answer, Client};

pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_cloud-hypervisor");
/// Limit of each wait on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process that is killed when this is dropped.
pub(crate) struct Kill(pub Child);

impl Drop for Kill {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running command that serves the API. It is killed when this is dropped.
pub(crate) struct Vmm {
    process: Kill,
    pub files: Files,
}

impl Vmm {
    /// Starts the command.
    pub(crate) fn start() -> Self {
        Self::of(Command::new(BINARY))
    }

    /// Starts `command`, which lacks only `--api-socket`.
    pub(crate) fn of(mut command: Command) -> Self {
        let files = Files::new();
        let (socket, log) = (files.path("socket"), File::create(files.path("log")).unwrap());
        command.arg("--api-socket").arg(&socket).current_dir(files.path(""));
        let process = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let vmm = Self { process: Kill(process), files };
        wait_for("the socket", || socket.exists());
        vmm
    }

    /// Starts it with a limit of open files.
    pub(crate) fn limited(limit: u64) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {limit} && exec \"$@\""), "sh", BINARY]);
        Self::of(command)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.files.path("socket")
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(&self.socket())
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.0.id()
    }

    /// The configuration of a VM with these NICs and a tiny guest that never ends.
    pub(crate) fn config(&self, net: Value) -> Value {
        json!({
            "payload": {"kernel": self.files.idle_kernel()},
            "cpus": {"boot_vcpus": 2, "max_vcpus": 2},
            "memory": {"size": 64 << 20},
            "net": net,
            "console": {"mode": "Off"},
        })
    }

    /// Creates and boots such a VM.
    pub(crate) fn boot(&self, net: Value) -> Client {
        self.boot_config(&self.config(net))
    }

    /// Creates and boots such a VM with shared memory.
    pub(crate) fn boot_shared(&self, net: Value) -> Client {
        let mut config = self.config(net);
        config["memory"]["shared"] = json!(true);
        self.boot_config(&config)
    }

    pub(crate) fn boot_config(&self, config: &Value) -> Client {
        let mut client = self.client();
        client.put_json("vm.create", config).expect(204);
        client.put("vm.boot").expect(204);
        // A thread sets its name shortly after it has started.
        wait_for("the vCPUs", || ["vcpu0\n", "vcpu1\n"].iter().all(|name| self.threads().contains(&name.to_string())));
        client
    }

    /// The number of its open files.
    pub(crate) fn open_files(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap().count()
    }

    /// The names of its threads, without those that are ending and those that the kernel adds to a process that uses
    /// KVM. A joined thread may be listed for a moment: the kernel wakes the joining thread before it removes the
    /// thread from the list.
    pub(crate) fn threads(&self) -> Vec<String> {
        let mut names = self.named_threads();
        // Until a thread has set its name, it has that of the process or of its parent thread.
        wait_for("the names of threads", || {
            names = self.named_threads();
            let of = |prefix| names.iter().filter(|name| name.starts_with(prefix)).count();
            of("cloud-hyperviso") == 1 && of("starter") <= 1
        });
        names
    }

    fn named_threads(&self) -> Vec<String> {
        let threads = fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        let threads = threads.map(|thread| thread.unwrap().path()).filter(|thread| !is_ending(thread));
        let mut names: Vec<_> = threads.filter_map(|thread| fs::read_to_string(thread.join("comm")).ok()).collect();
        names.retain(|name| !name.starts_with("kvm-"));
        names.sort();
        names
    }

    /// Ends it as `kill -9` does.
    pub(crate) fn kill(&mut self) {
        self.process.0.kill().unwrap();
        self.process.0.wait().unwrap();
    }

    /// Waits until it exits, and returns the exit code.
    pub(crate) fn end(mut self) -> Option<i32> {
        self.ended().code()
    }

    /// Waits until it exits, and returns its status.
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let mut status = None;
        wait_for("the program's end", || {
            status = self.process.0.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the program printed:\n{}", fs::read_to_string(self.files.path("log")).unwrap_or_default());
        }
    }
}

/// True if the thread with this folder below `/proc` is ending, and still listed.
fn is_ending(thread: &Path) -> bool {
    /// `PF_EXITING` in the flags of `/proc/[pid]/stat` (proc_pid_stat(5)).
    const EXITING: u32 = 1 << 2;
    let Ok(stat) = fs::read_to_string(thread.join("stat")) else { return true };
    // The thread's name may contain spaces; the fields after its bracket do not: the state, then six numbers, the last
    // of which are the flags.
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let flags: u32 = fields.split_whitespace().nth(6).unwrap().parse().unwrap();
    flags & EXITING != 0
}

/// The strings of an error, outermost first.
pub(crate) fn reasons(answer: &Answer) -> Vec<&str> {
    answer.body.as_array().into_iter().flatten().map(|reason| reason.as_str().unwrap()).collect()
}

/// Waits until `is_there` holds.
pub(crate) fn wait_for(what: &str, mut is_there: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_there() {
        assert!(Instant::now() < until, "waiting for {what} took too long");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The host's interfaces whose names start with `prefix`.
pub(crate) fn taps(prefix: &str) -> Vec<String> {
    let all = fs::read_dir("/sys/class/net").unwrap();
    let mut taps: Vec<_> = all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    taps.retain(|name| name.starts_with(prefix));
    taps.sort();
    taps
}
