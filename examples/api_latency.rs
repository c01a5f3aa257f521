//! Measures the latency of the API: median and 99th percentile over 200 calls of each kind.
//!
//! `cargo run --release --example api_latency [PROGRAM]`. PROGRAM defaults to the `cloud-hypervisor` of the same build
//! (`cargo build --release`). Needs /dev/kvm and the privilege to create taps.

#![expect(clippy::unwrap_used, reason = "a failure ends the program")]

#[path = "../tests/api/rig/client.rs"]
#[expect(dead_code, reason = "this client always reads whole answers")]
mod client;
#[path = "../tests/cli/files.rs"]
#[expect(dead_code, reason = "only one of its kernels is used here")]
mod files;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::client::Client;
use crate::files::Files;

const CALLS: usize = 200;

fn main() {
    let beside = || std::env::current_exe().unwrap().parent().unwrap().join("../cloud-hypervisor");
    let program = std::env::args_os().nth(1).map_or_else(beside, PathBuf::from);
    let files = Files::new();
    let socket = files.path("socket");
    let mut command = Command::new(&program);
    let mut vmm = command.arg("--api-socket").arg(&socket).stdin(Stdio::null()).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    while !socket.exists() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    measure(&files, &mut Client::connect(&socket));
    assert!(vmm.wait().unwrap().success());
}

fn measure(files: &Files, client: &mut Client) {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap();
    println!("load {}, {} processors", load.trim_end(), std::thread::available_parallelism().unwrap());
    let vm = json!({
        "payload": {"kernel": files.idle_kernel()},
        "memory": {"size": 64 << 20},
        "net": [{"id": "pf0", "tap": "apl0", "sriov_vfs": 8}],
    });
    let pf = json!({"id": "pf1", "tap": "apl1", "sriov_vfs": 8});
    let gone = json!({"id": "pf1"});
    tell("vmm.ping", client, |client| timed(|| client.get("vmm.ping").expect(200)));
    client.put_json("vm.create", &vm).expect(204);
    tell("vm.info, created", client, |client| timed(|| client.get("vm.info").expect(200)));
    tell("vm.add-net with 8 VFs, created", client, |client| {
        let time = timed(|| client.put_json("vm.add-net", &pf).expect(204));
        client.put_json("vm.remove-device", &gone).expect(204);
        time
    });
    client.put("vm.boot").expect(204);
    tell("vm.info, running, a PF and 8 VFs", client, |client| timed(|| client.get("vm.info").expect(200)));
    tell("vm.add-net with 8 VFs, running", client, |client| {
        let time = timed(|| client.put_json("vm.add-net", &pf).expect(200));
        // This guest releases devices only when it restarts.
        client.put_json("vm.remove-device", &gone).expect(204);
        client.put("vm.reboot").expect(204);
        time
    });
    client.put("vmm.shutdown").expect(200);
}

fn timed<T>(call: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    call();
    start.elapsed()
}

/// Prints the latency of `call` on `client`.
fn tell(what: &str, client: &mut Client, call: impl Fn(&mut Client) -> Duration) {
    let mut times: Vec<_> = (0..CALLS).map(|_| call(client)).collect();
    times.sort();
    let at = |percent: usize| times[CALLS * percent / 100 - 1].as_secs_f64() * 1e3;
    println!("{what:<34} median {:8.3} ms   99th percentile {:8.3} ms", at(50), at(99));
}
