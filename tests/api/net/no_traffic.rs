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

/// A VM whose guest drives VF 0 of `pf0` over the tap of this name, and not VF 1.
struct Guest {
    vmm: Vmm,
    client: Client,
    memory: File,
}

impl Guest {
    fn start(tap: &str) -> Self {
        fixtures::namespace::enter();
        let vmm = Vmm::start();
        let ram = vmm.files.sparse("ram", MEMORY);
        let vfs = json!([{"index": 0, "tap": tap}]);
        let net = json!({"id": "pf0", "tap": format!("{tap}pf"), "sriov_vfs": 2, "pci_device_id": 1, "vfs": vfs});
        let mut config = vmm.config(json!([net]));
        config["payload"]["kernel"] = json!(vmm.files.kernel(&guest::code()));
        config["memory"] = json!({"size": 0, "zones": [{"id": "all", "size": MEMORY, "file": ram, "shared": true}]});
        let client = vmm.boot_config(&config);
        let memory = File::options().read(true).write(true).open(&ram).unwrap();
        Self { vmm, client, memory }
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

    /// Sets the number of buffers that the driver has made available in a queue.
    fn make_available(&mut self, queue: u32, count: u16) {
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
            let counters = shown(&self.vmm, "counters");
            counters.lines().any(|line| line.split_whitespace().take(2).eq(["pf0v0", counter]))
        });
        assert_named(counter);
    }
}

/// A frame of 60 bytes of another host, for this address.
fn frame(to: [u8; 6]) -> Vec<u8> {
    [&to[..], &[2, 0, 0, 0, 0, 0x77], &[8, 0], &[0; 46]].concat()
}

#[test]
fn causes_at_a_vf_are_shown_by_the_commands_of_the_page() {
    const TAP: &str = "notrvf";
    let dropped = || fs::read_to_string(format!("/sys/class/net/{TAP}/statistics/tx_dropped")).unwrap();
    let mut guest = Guest::start(TAP);
    guest.enable();
    guest.expect_row("enabled", " enabled ");
    guest.expect_row("running", " running ");

    // Receive buffers: none, so that the tap's queue fills up.
    wait_for("frames dropped by the host", || {
        (0..100).for_each(|_| send(TAP, &frame([2, 0, 0, 0, 0, 0x99])));
        dropped().trim() != "0"
    });
    assert_named("TX dropped");
    // The frames that wait there take no buffers, which their successors need.
    guest.set(&json!({"vlan": 100}));
    guest.provide(0, 2048);
    guest.expect_counter("rx_vlan_filtered", || send(TAP, &frame([0xff; 6])));
    guest.set(&json!({"vlan": 0, "max_tx_rate": 1}));
    // Together 8 Mbit.
    guest.provide(1, 60_000);
    guest.expect_counter("tx_rate_waits", || {});
    guest.expect_row("RATE", " 1M ");

    guest.set(&json!({"max_tx_rate": 0, "link": "down"}));
    guest.expect_row("link down: set down by the host", "pf0v0: link down: set down by the host");
    guest.set(&json!({"link": "auto"}));
    wait_for("the link", || !shown(&guest.vmm, "vfs").contains("link down"));
    guest.make_available(1, 10 * SIZE);
    guest.expect_row("needs reset", " needs reset ");
    ip(&["link", "del", TAP]);
    guest.expect_row("(lost)", "pf0v0: backend lost");
}
