//! A guest that moves between two VMMs of one machine over a Unix socket: its downtime and the parts of it, the time in
//! which its NICs do not answer, and the amount of data sent.

use std::path::Path;
use std::slice;
use std::time::{Duration, Instant};

use integration::migration_wire::{Point, Then, Wire};
use integration::{Answers, Backend, Bridge, Guest, Kernel, Pf, Plan, Probes, Site, Subnet, predicted_vf_address};
use serde_json::{Value, json};

use crate::IDLE;
use crate::figures::{Bench, NETWORK, Server, Settings, Spread, Test};

/// Eight VFs.
const VFS: [Backend; 8] = [
    Backend::Tap,
    Backend::Tap,
    Backend::Tap,
    Backend::VhostNet,
    Backend::VhostNet,
    Backend::VhostNet,
    Backend::VhostUser,
    Backend::VhostUser,
];
/// The most that a PF can have.
const MANY: [Backend; 255] = [Backend::Tap; 255];
/// Most VFs that have a driver: a vCPU has some 200 interrupt vectors, and a VF needs three.
const MOST_BOUND: usize = 64;
/// Most VFs that are pinged.
const MOST_PINGED: usize = 8;
/// The time between two pings to the same NIC.
const PAUSE: Duration = Duration::from_millis(10);
/// Writes 10 MiB of random bytes each tenth of a second, to the same 100 MiB again and again.
const WRITER: &str = "head -c 10485760 /dev/urandom > /tmp/from; at=0; while :; do dd if=/tmp/from of=/tmp/to bs=1M \
                      count=10 seek=$at conv=notrunc 2> /dev/null; at=$(( (at + 10) % 100 )); sleep 0.1; done";

/// Runs all measurements, or only the one in the settings.
pub(crate) fn measure(settings: Settings<'_>) {
    let wants = |test: &str| settings.only.is_none_or(|only| only == test);
    if wants("one") {
        moves("one NIC", &[], "", How::Copied, settings.runs);
    }
    if wants("local") {
        moves("one NIC, local", &[], "", How::Passed, settings.runs);
    }
    if wants("eight") {
        moves("8 VFs", &VFS, "", How::Copied, settings.runs);
    }
    if wants("many") {
        moves("255 VFs", &MANY, "", How::Copied, settings.runs);
    }
    if wants("writes") {
        moves("one NIC, 100 MiB/s of writes", &[], WRITER, How::Copied, settings.runs);
    }
    if wants("cancel") {
        cancel(settings.runs);
    }
    if wants("copying") {
        copying(settings);
    }
}

/// In the middle of the first pass.
const IN_FIRST_PASS: Point = Point::Frame(3, 8);

/// The way in which a guest's memory reaches the other VMM.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// Copied over a socket.
    Copied,
    /// Shared, with its taps (`local`).
    Passed,
}

/// Two places, with the guest at the first.
struct Pair {
    here: Site,
    there: Site,
    /// The networks of the pinged functions.
    subnets: Vec<Subnet>,
    _bridges: Vec<Bridge>,
}

impl Pair {
    /// Boots a guest of 512 MiB, or of 1,024 with more than 8 VFs, whose PF has VFs over these backends, and waits
    /// until it is idle.
    fn start(kinds: &[Backend], how: How) -> Pair {
        let [here, there] = ["a", "b"].map(|name| Plan::new(name, kinds));
        let bridge = |(subnet, port): (Subnet, String)| {
            let ports = [format!("a{port}"), format!("b{port}")];
            Bridge::new(&format!("br{port}"), subnet, &ports.each_ref().map(String::as_str))
        };
        let ports = match kinds {
            [] => vec![(Subnet(0), "pf".to_string())],
            kinds => {
                let pinged = 0..kinds.len().min(MOST_PINGED);
                pinged.map(|index| (Subnet(index as u8), index.to_string())).collect()
            }
        };
        let subnets = ports.iter().map(|(subnet, _)| *subnet).collect();
        let bridges = ports.into_iter().map(bridge).collect();
        let memory = match how {
            How::Passed => "size=512M,shared=on",
            // A driver uses some 4 MiB for its buffers.
            How::Copied if kinds.len() > MOST_PINGED => "size=1024M",
            How::Copied => "size=512M",
        };
        let spec = |spec: integration::GuestSpec| spec.memory(memory).kernel_argument("tsc=reliable");
        let mut here = here.boot(Kernel::V6_12, spec);
        let there = there.wait(&[]);
        join(&mut here.guest, kinds.len());
        here.guest.wait_for(IDLE);
        Pair { here, there, subnets, _bridges: bridges }
    }

    fn turn(self) -> Pair {
        Pair { here: self.there, there: self.here, ..self }
    }
}

/// Makes the NIC, or the VFs, join their networks.
fn join(guest: &mut Guest, vfs: usize) {
    if vfs == 0 {
        return guest.join("eth0", Subnet(0));
    }
    let pf = Pf::find(guest);
    if vfs <= MOST_BOUND {
        pf.set_num_vfs(guest, vfs);
    } else {
        pf.set_num_vfs_without_drivers(guest, vfs);
        let addresses: Vec<_> = (0..MOST_BOUND).map(predicted_vf_address).collect();
        let bind =
            format!("for vf in {}; do echo $vf > /sys/bus/pci/drivers/virtio-pci/bind; done", addresses.join(" "));
        guest.ok_within(&bind, Duration::from_secs(600));
    }
    for vf in pf.vfs(guest).iter().take(vfs.min(MOST_PINGED)) {
        guest.join(vf.interface(), Subnet(vf.index as u8));
    }
}

/// Moves the guest back and forth while `load` runs in it.
fn moves(what: &str, kinds: &[Backend], load: &str, how: How, runs: usize) {
    let mut pair = Pair::start(kinds, how);
    if !load.is_empty() {
        pair.here.guest.ok(&format!("({load}) > /dev/null 2>&1 &"));
        pair.here.guest.ok("sleep 3");
    }
    let (mut all, mut gaps) = (Vec::new(), Vec::new());
    // The first move fills caches.
    for run in 0..=runs {
        let probes = Probes::start(&pair.subnets, PAUSE);
        // The first answers take longer, because of ARP.
        std::thread::sleep(Duration::from_millis(300));
        probes.forget();
        let sent = match how {
            How::Copied => pair.here.move_to(&pair.there, &json!({})),
            How::Passed => pair.here.pass_to(&pair.there),
        };
        std::thread::sleep(Duration::from_millis(300));
        let answers = probes.end();
        if run > 0 {
            gaps.push(longest(&answers));
            all.push(sent);
        }
        pair = pair.turn();
    }
    let number = |name: &str, scale: f64| -> Vec<f64> {
        all.iter().map(|sent: &Value| sent.pointer(name).and_then(Value::as_f64).unwrap() / scale).collect()
    };
    for (figure, name, scale) in [
        ("downtime, ms", "/downtime/total_us", 1e3),
        ("of it to stop, ms", "/downtime/stop_us", 1e3),
        ("of it to save, ms", "/downtime/save_us", 1e3),
        ("of it to send, ms", "/downtime/send_us", 1e3),
        ("of it to load, ms", "/downtime/load_us", 1e3),
        ("of it to hand over, ms", "/downtime/handover_us", 1e3),
        ("in all, ms", "/elapsed_ms", 1.0),
        ("sent, MiB", "/transferred_bytes", 1048576.0),
        ("pages that are not zero, MiB", "/pages", 256.0),
        ("passes", "/pass", 1.0),
        ("the guest held back, %", "/throttle_percent", 1.0),
    ] {
        println!("| migration, {what} | {figure} | {} | |", Spread::of(number(name, scale)));
    }
    println!("| migration, {what} | longest time without an answer, ms | {} | |", Spread::of(gaps));
    pair.here.guest.assert_kernel_has_no_complaint();
}

fn longest(answers: &[Answers]) -> f64 {
    let gaps = answers.iter().map(|answers| answers.gap.as_secs_f64() * 1e3);
    gaps.fold(0.0, f64::max)
}

/// Cancels migrations while the guest is paused, and measures until it runs again.
fn cancel(runs: usize) {
    let pair = Pair::start(&VFS, How::Copied);
    let target = pair.there.url();
    let path = std::env::temp_dir().join("wire");
    let (mut times, mut gaps) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        pair.there.receive();
        // The target has loaded everything: this is the longest way back.
        let wire = Wire::new(&path, Path::new(target.trim_start_matches("unix:")), &[Point::READY]);
        pair.here.send(&format!("unix:{}", path.display()), &json!({}));
        wire.reaches();
        let probes = Probes::start(&pair.subnets, Duration::from_millis(2));
        let began = Instant::now();
        assert_eq!(pair.here.api.put("vm.cancel-migration").status, 204);
        while pair.here.api.get("vm.migration-progress").body["state"] == "active" {}
        times.push(began.elapsed().as_secs_f64() * 1e3);
        std::thread::sleep(Duration::from_millis(300));
        gaps.push(longest(&probes.end()));
        wire.goes(Then::Passes);
        // Ready finds no recipient now, and the wire may close both connections before it has forwarded the source's
        // cancel.
        let ended = pair.there.ended();
        assert!(["cancelled", "failed"].map(Value::from).contains(&ended["state"]), "{ended}");
    }
    println!("| migration, 8 VFs | cancelled at its end, ms | {} | |", Spread::of(times));
    println!("| migration, 8 VFs | the same until a NIC answers again, ms | {} | |", Spread::of(gaps));
}

/// Measures what a guest sends and receives over a VF, before and while its memory is copied. The first pass is held
/// back as long as a test takes: writes are logged, and the copying, for which a host has another processor, takes no
/// time of this one.
fn copying(settings: Settings<'_>) {
    let mut pair = Pair::start(&[Backend::Tap], How::Copied);
    let _server = Server::start("0.0.0.0");
    let (host, seconds) = (Subnet(0).host(), settings.seconds);
    let measure = |guest: &mut Guest, when: &str, test: &Test| {
        let mut bench = Bench { guest, settings: Settings { only: None, ..settings } };
        let command = |test: &str| format!("netbench client {host} {test} {seconds}");
        bench.measure_by(&format!("migration, one VF, {when}"), slice::from_ref(test), command);
    };
    for test in &NETWORK {
        measure(&mut pair.here.guest, "before", test);
        let wire = pair.here.send_until(&pair.there, IN_FIRST_PASS, &json!({}));
        // The sockets need some more.
        pair.here.guest.wait_for(IDLE);
        measure(&mut pair.here.guest, "while memory is copied", test);
        let progress = pair.here.api.get("vm.migration-progress").body;
        let expected = json!({"state": "active", "phase": "copying", "pass": 0, "throttle_percent": 0});
        for (key, value) in expected.as_object().unwrap() {
            assert_eq!(&progress[key], value, "{progress}");
        }
        assert_eq!(pair.here.api.put("vm.cancel-migration").status, 204);
        wire.goes(Then::Passes);
        assert_eq!(pair.here.ended()["state"], "cancelled");
        pair.there.ended();
    }
}
