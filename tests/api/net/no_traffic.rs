//! Causes of a function without traffic, which the page docs/guide/no-traffic.md names by its commands.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::faults::guest;
use crate::net::tap::{ip, send};
use crate::rig::client::Client;
use crate::rig::code::{RINGS, SIZE};
use crate::rig::driven::Driven;
use crate::rig::vmm::{BINARY, Vmm, wait_for};

/// Size of the guest's memory.
const MEMORY: u64 = 64 << 20;
/// Memory that is never written.
const ZEROS: u32 = 0x200_0000;
/// Memory for a frame that the driver sends.
const FRAME: u32 = 0x180_0000;
/// The length of virtio's header of a frame.
const HEADER: usize = 12;
/// Addresses of VF 0, of VF 1, and of no function.
const VF0: [u8; 6] = [0x52, 0x54, 0, 0, 2, 0];
const VF1: [u8; 6] = [0x52, 0x54, 0, 0, 2, 1];
const UNKNOWN: [u8; 6] = [2, 0, 0, 0, 0, 0x99];

/// Runs a command of the page, and returns its text for people.
fn shown(vmm: &Vmm, command: &str) -> String {
    let mut remote = Command::new(env!("CARGO_BIN_EXE_ch-remote"));
    let output = remote.arg("--api-socket").arg(vmm.socket()).args(["--text", command]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn page() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guide/no-traffic.md")).unwrap()
}

/// Checks that a table of the page has a row for what its commands show.
fn assert_named(sign: &str) {
    let is_row = |line: &str| line.starts_with('|') && line.contains(&format!("`{sign}`"));
    assert!(page().lines().any(is_row), "the page has no row for {sign}");
}

/// A VM whose guest has a driver of the PF `nic` with these settings, which has sent one frame: 60 bytes of 0.
fn sender(tap: &str, settings: &Value) -> Driven {
    let mut net = json!({"id": "nic", "tap": tap, "sriov_vfs": 2});
    settings.as_object().unwrap().iter().for_each(|(key, value)| net[key] = value.clone());
    Driven::start(Command::new(BINARY), tap, &json!({"net": [net]}))
}

#[test]
fn causes_of_no_traffic_are_shown_by_the_commands_of_the_page() {
    assert!(page().contains("--text vfs") && page().contains("--text counters"));
    for (tap, settings, cause) in [
        ("notrspoof", json!({"spoofchk": true}), "tx_spoofed_mac"),
        ("notrvlan", json!({"trunk": [7]}), "tx_bad_vlan"),
        ("notrdown", json!({"link": "down"}), "tx_link_down"),
    ] {
        let driven = sender(tap, &settings);
        assert_named(cause);
        // The host may have sent frames, too, which a link that is down also drops.
        let (counted, begin) = (format!("{cause} 1"), "nic: dropped: ");
        let is_note =
            |line: &str| line.strip_prefix(begin).is_some_and(|causes| causes.split(", ").any(|one| one == counted));
        wait_for(cause, || shown(&driven.vmm, "vfs").lines().any(is_note));
        let counters = shown(&driven.vmm, "counters");
        assert!(counters.lines().any(|line| line.split_whitespace().eq(["nic", cause, "1"])), "{counters}");
        let vfs = shown(&driven.vmm, "vfs");
        assert_eq!(vfs.lines().filter(|line| line.contains(" reserved ")).count(), 2, "{vfs}");
        assert_named("reserved");
    }
    let driven = sender("notrgone", &json!({}));
    assert_named("(lost)");
    assert!(!shown(&driven.vmm, "vfs").contains("dropped"));
    ip(&["link", "del", "notrgone"]);
    wait_for("the loss", || shown(&driven.vmm, "vfs").contains("nic: backend lost"));
}

/// A VM whose guest drives VF 0 of `pf0`, and not VF 1.
struct Guest {
    vmm: Vmm,
    client: Client,
    memory: File,
    /// The buffers that the driver has made available in the transmit queue.
    sent: u16,
}

impl Guest {
    /// Starts a VM with these settings of `pf0`.
    fn start(settings: &Value) -> Self {
        fixtures::namespace::enter();
        let vmm = Vmm::start();
        let ram = vmm.files.sparse("ram", MEMORY);
        let mut net = json!({"id": "pf0", "sriov_vfs": 2, "pci_device_id": 1});
        net.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        let mut config = vmm.config(json!([net]));
        config["payload"]["kernel"] = json!(vmm.files.kernel(&guest::code()));
        config["memory"] = json!({"size": 0, "zones": [{"id": "all", "size": MEMORY, "file": ram, "shared": true}]});
        let client = vmm.boot_config(&config);
        let memory = File::options().read(true).write(true).open(&ram).unwrap();
        Self { vmm, client, memory, sent: 0 }
    }

    fn write(&self, address: u32, bytes: &[u8]) {
        self.memory.write_all_at(bytes, address.into()).unwrap();
    }

    fn read(&self, address: u32) -> u32 {
        let mut bytes = [0; 4];
        self.memory.read_exact_at(&mut bytes, address.into()).unwrap();
        u32::from_ne_bytes(bytes)
    }

    /// Makes the guest enable the VFs, and drive the first.
    fn enable(&self) {
        self.write(guest::COMMAND, &guest::ENABLE.to_ne_bytes());
        wait_for("the guest", || self.read(guest::COMMAND) == 0);
        assert_eq!(self.read(guest::STATUS), guest::RUNNING);
    }

    /// Makes [`SIZE`] buffers of this length available in the receive queue, 0, or in the transmit queue, 1.
    fn provide(&mut self, queue: u32, len: u32) {
        let rings = guest::RINGS_AT + queue * RINGS;
        for index in 0..SIZE {
            let (buffer, flags) = match queue {
                0 => (rings + 0x3000 + u32::from(index) * len, 2u16),
                _ => (ZEROS, 0),
            };
            let descriptor = [&u64::from(buffer).to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &[0, 0]];
            self.write(rings + 16 * u32::from(index), &descriptor.concat());
            self.write(rings + 0x1004 + 2 * u32::from(index), &index.to_le_bytes());
        }
        self.make_available(queue, SIZE);
    }

    /// Makes the driver send a frame behind this header.
    fn send(&mut self, header: [u8; HEADER], frame: &[u8]) {
        self.write(FRAME, &[&header, frame].concat());
        self.send_buffer(FRAME, (HEADER + frame.len()) as u32);
    }

    /// Makes the driver send what it says is at this address of its memory.
    fn send_buffer(&mut self, buffer: u32, len: u32) {
        let (rings, index) = (guest::RINGS_AT + RINGS, self.sent % SIZE);
        let descriptor = [&u64::from(buffer).to_le_bytes()[..], &len.to_le_bytes(), &[0; 4]].concat();
        self.write(rings + 16 * u32::from(index), &descriptor);
        self.write(rings + 0x1004 + 2 * u32::from(index), &index.to_le_bytes());
        self.make_available(1, self.sent + 1);
    }

    /// Sets the number of buffers that the driver has made available in a queue.
    fn make_available(&mut self, queue: u32, count: u16) {
        if queue == 1 {
            self.sent = count;
        }
        self.write(guest::RINGS_AT + queue * RINGS + 0x1002, &count.to_le_bytes());
        // The workers look at the queues when they start.
        self.client.put("vm.pause").expect(204);
        self.client.put("vm.resume").expect(204);
    }

    fn set(&mut self, change: &Value) {
        let mut body = json!({"pf": "pf0", "index": 0});
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        self.client.put_json("vm.set-vf", &body).expect(204);
    }

    /// Waits until `vfs` shows this about VF 0, and checks that the page names `sign`.
    fn expect_row(&self, sign: &str, text: &str) {
        wait_for(text, || shown(&self.vmm, "vfs").contains(text));
        assert_named(sign);
    }

    /// Waits until `counters` shows this counter of VF 0, after each `cause` of it, and checks that the page names it.
    fn expect_counter(&self, counter: &str, cause: impl Fn()) {
        wait_for(counter, || {
            cause();
            self.shows(counter)
        });
        assert_named(counter);
    }

    /// True if `counters` shows this counter of VF 0.
    fn shows(&self, counter: &str) -> bool {
        let counters = shown(&self.vmm, "counters");
        counters.lines().any(|line| line.split_whitespace().take(2).eq(["pf0v0", counter]))
    }

    /// Makes the driver send frames to this address, or other bytes, until `counters` shows this counter of VF 0, and
    /// checks that the page names it.
    fn expect_refusal(&mut self, counter: &str, send: impl Fn(&mut Self)) {
        assert!(!self.shows(counter), "{counter} has another cause");
        wait_for(counter, || {
            send(self);
            self.shows(counter)
        });
        assert_named(counter);
    }
}

/// A frame of 60 bytes of VF 0, for this address.
fn own_frame(to: [u8; 6]) -> Vec<u8> {
    [&to[..], &VF0, &[8, 0], &[0; 46]].concat()
}

/// A frame of 60 bytes of another host, for this address.
fn frame(to: [u8; 6]) -> Vec<u8> {
    [&to[..], &[2, 0, 0, 0, 0, 0x77], &[8, 0], &[0; 46]].concat()
}

#[test]
fn causes_at_a_vf_are_shown_by_the_commands_of_the_page() {
    const TAP: &str = "notrvf";
    let dropped = || fs::read_to_string(format!("/sys/class/net/{TAP}/statistics/tx_dropped")).unwrap();
    let mut guest =
        Guest::start(&json!({"tap": format!("{TAP}pf"), "mtu": 9000, "vfs": [{"index": 0, "tap": TAP, "mtu": 9000}]}));
    send(TAP, &frame(UNKNOWN));
    guest.enable();
    guest.expect_counter("rx_stale", || {});
    guest.expect_row("enabled", " enabled ");
    guest.expect_row("running", " running ");

    // Receive buffers: none, so that the tap's queue fills up.
    wait_for("frames dropped by the host", || {
        (0..100).for_each(|_| send(TAP, &frame(UNKNOWN)));
        dropped().trim() != "0"
    });
    assert_named("TX dropped");
    // The frames that wait there take no buffers, which their successors need.
    guest.set(&json!({"vlan": 100}));
    guest.provide(0, 2048);
    guest.expect_counter("rx_vlan_filtered", || send(TAP, &frame([0xff; 6])));
    // The driver has no filter of its own.
    guest.set(&json!({"vlan": 0, "trust": false}));
    guest.expect_counter("rx_filtered", || send(TAP, &frame(UNKNOWN)));
    // The driver's buffers have 2,048 bytes.
    guest.expect_counter("rx_too_long", || send(TAP, &[frame([0xff; 6]), vec![0; 4000]].concat()));
    guest.set(&json!({"max_tx_rate": 1}));
    // Together 8 Mbit.
    guest.provide(1, 60_000);
    guest.expect_counter("tx_rate_waits", || {});
    guest.expect_row("RATE", " 1M ");

    guest.set(&json!({"max_tx_rate": 0, "link": "down"}));
    guest.expect_row("link down: set down by the host", "pf0v0: link down: set down by the host");
    guest.expect_counter("rx_link_down", || send(TAP, &frame([0xff; 6])));
    guest.set(&json!({"link": "auto"}));
    wait_for("the link", || !shown(&guest.vmm, "vfs").contains("link down"));
    ip(&["link", "set", TAP, "down"]);
    guest.expect_row(
        "link down: its tap is down",
        &format!("pf0v0: link down: its tap is down; set that up: ip link set {TAP} up"),
    );
    guest.expect_refusal("tx_backend_errors", |guest| guest.send([0; HEADER], &frame(UNKNOWN)));
    assert!(guest.client.get("vm.info").expect(200)["sriov"][0]["vfs"][0]["backend"]["down"] == true);
    ip(&["link", "set", TAP, "up"]);
    wait_for("the link", || !shown(&guest.vmm, "vfs").contains("link down"));
    guest.make_available(1, 10 * SIZE);
    guest.expect_row("needs reset", " needs reset ");
    ip(&["link", "del", TAP]);
    guest.expect_row("(lost)", "pf0v0: backend lost");
}

/// Settings of `pf0` with a switch.
fn on_a_switch(uplink: Option<&str>) -> Value {
    let mac = |bytes: [u8; 6]| bytes.map(|byte| format!("{byte:02x}")).join(":");
    let vfs = json!([{"index": 0, "mac": mac(VF0)}, {"index": 1, "mac": mac(VF1)}]);
    let mut settings = json!({"switch": "veb", "vfs": vfs});
    uplink.into_iter().for_each(|tap| settings["tap"] = json!(tap));
    settings
}

#[test]
fn causes_at_a_sender_on_a_switch_are_shown_by_the_page() {
    let mut guest = Guest::start(&on_a_switch(None));
    guest.enable();
    assert!(!guest.shows("rx_frames") && !guest.shows("tx_frames"), "nothing was sent");
    assert_named("rx_frames");
    guest.expect_refusal("tx_unknown", |guest| guest.send([0; HEADER], &own_frame(UNKNOWN)));
    let lldp = [1, 0x80, 0xc2, 0, 0, 0xe];
    guest.expect_refusal("tx_reserved_group", |guest| guest.send([0; HEADER], &own_frame(lldp)));
    guest.set(&json!({"storm": 1}));
    guest.expect_refusal("storm_dropped", |guest| guest.send([0; HEADER], &own_frame([0xff; 6])));
    guest.set(&json!({"isolated": true}));
    guest.expect_row("I", "  SI ");
    guest.expect_refusal("tx_isolated", |guest| guest.send([0; HEADER], &own_frame(VF1)));
    // VIRTIO_NET_HDR_F_NEEDS_CSUM, which the driver has not negotiated.
    let wrong = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    guest.expect_refusal("tx_bad_headers", |guest| guest.send(wrong, &own_frame(VF1)));
    guest.expect_refusal("tx_bad_chains", |guest| guest.send_buffer(0xf000_0000, 72));
}

#[test]
fn causes_at_a_receiver_on_a_switch_are_shown_by_the_page() {
    const UPLINK: &str = "notrup";
    let mut guest = Guest::start(&on_a_switch(Some(UPLINK)));
    guest.enable();
    guest.expect_counter("rx_no_buffers", || send(UPLINK, &frame(VF0)));
    guest.set(&json!({"rate_limiter_config": {"ops": {"size": 1, "refill_time": 3_600_000}}}));
    guest.provide(0, 2048);
    guest.expect_counter("rx_rate_dropped", || send(UPLINK, &frame(VF0)));
    ip(&["link", "set", UPLINK, "down"]);
    let shown = format!("pf0v0: link down: the uplink {UPLINK} of its switch is down");
    guest.expect_row("link down: the uplink up0 of its switch is down", &shown);
}
