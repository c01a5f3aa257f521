//! The memory on both sides of a live migration, at the moment of the handover: all pages are equal, with
//! any writer. To show that the comparison detects differences, each dirty log is left out in turn.

use std::fs::File;
use std::net::UdpSocket;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use fixtures::Common;
use fixtures::vhost_user::Backend;
use serde_json::{Value, json};

use crate::migration::{receive_by, url, wait_for_state};
use crate::migration_wire::{Point, Then, Wire};
use crate::net::tap::Kept;
use crate::rig::client::Client;
use crate::rig::code::{Code, RINGS, SIZE};
use crate::rig::driven::{drive_in, slot};
use crate::rig::vmm::{BINARY, Vmm, wait_for};

pub(crate) const MEMORY: u64 = 64 << 20;
const PAGE: usize = 4096;
/// The guest waits until this is not 0.
const COMMAND: u32 = 0x30_0000;
/// The beginning of the filled memory: the guest's instructions are below.
const FILLED: u64 = 8 << 20;
/// Address of the guest's endless counter.
const COUNTER: u32 = 0x20_0000;
/// The rings of the first NIC, for its two queues, and the distance to those of the next.
const RINGS_AT: u32 = 0x100_0000;
const RINGS_OF_NIC: u32 = 2 * RINGS;
/// Address of the first NIC's frame buffers, each on its own page, and the distance to those of the next NIC.
const BUFFERS_AT: u32 = 0x120_0000;
const BUFFERS_OF_NIC: u32 = SIZE as u32 * PAGE as u32;
/// The frame of pages at whose arrival the target has the first pages of the first pass: they all come before it.
const HALFWAY: Point = Point::Frame(3, 20);
/// An environment variable of test builds: the dirty log to leave out.
const LEFT_OUT: &str = "CH_TEST_LEAVE_OUT";

/// A NIC's network on the host: a tap, with an address in its own network.
struct Network {
    tap: Kept,
    address: String,
    neighbour: String,
}

impl Network {
    fn new(name: &str) -> Self {
        let tap = Kept::silent(name);
        // Tests run at the same time, and the host identifies a network by its number.
        static NUMBERS: AtomicU8 = AtomicU8::new(16);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let (address, neighbour) = (format!("10.78.{number}.1"), format!("10.78.{number}.2:9"));
        let status = Command::new("ip").args(["addr", "add", &format!("{address}/24"), "dev", name]).status();
        assert!(status.unwrap().success());
        Self { tap, address, neighbour }
    }

    /// Makes the host look for a neighbour, which sends a frame to the guest.
    fn send(&self) {
        let socket = UdpSocket::bind((&*self.address, 0)).unwrap();
        socket.send_to(&[0], &self.neighbour).unwrap();
    }
}

/// A guest that counts and drives two NICs, one over a tap and one over vhost-user, and both VMMs, which keep running
/// without it.
pub(crate) struct Pair {
    networks: [Network; 2],
    _peers: [Arc<Backend>; 2],
    pub source: Vmm,
    pub client: Client,
    pub target: Vmm,
    memory: File,
}

impl Pair {
    /// Starts the guest, in a program without the dirty log `left_out`. `name` is short, and unique to the test.
    pub(crate) fn start(name: &str, left_out: &str) -> Self {
        let start = || {
            let mut command = Command::new(BINARY);
            command.arg("--no-shutdown").env(LEFT_OUT, left_out);
            Vmm::of(command)
        };
        let (source, target) = (start(), start());
        let networks = [0, 1].map(|number| Network::new(&format!("{name}{number}")));
        // The target's backend has no network: it serves a guest that does not run there.
        let peers = [
            peer(&source, &format!("name=here,tap={}", networks[1].tap.name())),
            peer(&target, "name=there,ip=10.78.9.1"),
        ];
        let path = source.files.sparse("ram", MEMORY);
        target.files.sparse("ram", MEMORY);
        let memory = File::options().read(true).write(true).open(path).unwrap();
        let client = boot(&source, networks[0].tap.name());
        fill(&memory);
        memory.write_all_at(&[1], COMMAND.into()).unwrap();
        wait_for("the drivers", || read(&memory, COUNTER) > 0);
        Self { networks, _peers: peers, source, client, target, memory }
    }

    /// Migrates the guest. During the copy, frames arrive for both NICs. Returns the pages that differ just before the
    /// handover.
    fn moves(&mut self) -> Vec<u64> {
        // The target's tap is created there, and is not connected.
        let tap = format!("{}t", self.networks[0].tap.name());
        receive(&self.target, &tap);
        let path = self.source.files.path("wire");
        let wire = Wire::new(&path, &self.target.files.path("migration"), &[HALFWAY, Point::GO]);
        let body = json!({"destination_url": format!("unix:{}", path.display())});
        self.client.put_json("vm.send-migration", &body).expect(204);
        wire.reaches();
        let frames = |nic: u32| read(&self.memory, RINGS_AT + nic * RINGS_OF_NIC + 0x2000) >> 16;
        let before = [frames(0), frames(1)];
        self.networks.iter().for_each(Network::send);
        wait_for("the frames", || frames(0) > before[0] && frames(1) > before[1]);
        let counted = read(&self.memory, COUNTER);
        wait_for("the guest", || read(&self.memory, COUNTER) != counted);
        wire.goes(Then::Passes);
        wire.reaches();
        let differing = differing(&self.memory, &File::open(self.target.files.path("ram")).unwrap());
        wire.goes(Then::Passes);
        let sent = wait_for_state(&mut self.client, "finished");
        assert!(sent["transferred_bytes"].as_u64().unwrap() > MEMORY / 2, "{sent}");
        differing
    }
}

/// Makes `vmm` wait for the guest, whose first NIC will use `tap`, and whose second the backend there.
pub(crate) fn receive(vmm: &Vmm, tap: &str) {
    let backends = json!([{"id": "tapped", "tap": tap}, {"id": "user", "vhost_socket": vmm.files.path("peer")}]);
    receive_by(vmm, &json!({"receiver_url": url(vmm), "backends": backends}));
}

/// Counter of the guest in `vmm`.
pub(crate) fn counter(vmm: &Vmm) -> u32 {
    read(&File::open(vmm.files.path("ram")).unwrap(), COUNTER)
}

/// A vhost-user backend with the socket `peer` in `vmm`'s folder, until this is dropped.
pub(crate) fn peer(vmm: &Vmm, device: &str) -> Arc<Backend> {
    let common = Common { queues: 2, without_feature: Vec::new(), translate: false, never_answer: false };
    let backend = Backend::new(&common, &format!("{device},mac=52:54:00:00:00:05").parse().unwrap()).unwrap();
    backend.start(format!("socket={},{device}", vmm.files.path("peer").display()).parse().unwrap()).unwrap();
    backend
}

/// Fills the memory, so that much must be sent; zeroes the rings.
fn fill(memory: &File) {
    let page: Vec<u8> = (0..PAGE).map(|at| (at * 7 % 251) as u8 | 1).collect();
    let mib = page.repeat((1 << 20) / PAGE);
    for at in (FILLED..MEMORY).step_by(1 << 20) {
        memory.write_all_at(&mib, at).unwrap();
    }
    memory.write_all_at(&vec![0; 4 * RINGS as usize], RINGS_AT.into()).unwrap();
    for nic in 0..2 {
        let rings = u64::from(RINGS_AT + nic * RINGS_OF_NIC);
        for index in 0..SIZE {
            let buffer = u64::from(BUFFERS_AT + nic * BUFFERS_OF_NIC) + u64::from(index) * PAGE as u64;
            // Device-writable, and the last of its chain (`virtio 1.4 §2.7.5`).
            let descriptor = [&buffer.to_le_bytes()[..], &2048_u32.to_le_bytes(), &2_u16.to_le_bytes(), &[0; 2]];
            memory.write_all_at(&descriptor.concat(), rings + 16 * u64::from(index)).unwrap();
            memory.write_all_at(&index.to_le_bytes(), rings + 0x1004 + 2 * u64::from(index)).unwrap();
        }
        memory.write_all_at(&SIZE.to_le_bytes(), rings + 0x1002).unwrap();
    }
}

/// Boots the guest, whose instructions depend on its NICs' slots.
fn boot(vmm: &Vmm, tap: &str) -> Client {
    let mut config = vmm.config(json!([
        {"id": "tapped", "tap": tap},
        {"id": "user", "vhost_user": true, "vhost_socket": vmm.files.path("peer")},
    ]));
    // A path that is different for each program.
    config["memory"] = json!({"size": 0, "zones": [{"id": "all", "size": MEMORY, "file": "ram", "shared": true}]});
    let mut client = vmm.boot_config(&config);
    let tree: Value = client.get("vm.info").expect(200)["device_tree"].clone();
    client.put("vm.shutdown").expect(204);
    // 0: mov eax, [COMMAND]; 5: test eax, eax; 7: pause; 9: jz 0
    let wait = Code::default().bytes(&[&[0xa1], &COMMAND.to_le_bytes(), &[0x85, 0xc0, 0xf3, 0x90, 0x74, 0xf5]]);
    let code = (0..)
        .zip(["tapped", "user"])
        .fold(wait, |code, (nic, id)| drive_in(code, slot(&tree, id), &[0, 1], RINGS_AT + nic * RINGS_OF_NIC));
    // inc dword [COUNTER]; jmp to it
    let code = code.bytes(&[&[0xff, 0x05], &COUNTER.to_le_bytes(), &[0xeb, 0xf8]]).0;
    vmm.files.kernel(&code);
    client.put("vm.boot").expect(204);
    client
}

fn read(memory: &File, address: u32) -> u32 {
    let mut bytes = [0; 4];
    memory.read_exact_at(&mut bytes, address.into()).unwrap();
    u32::from_ne_bytes(bytes)
}

/// The pages that differ.
fn differing(one: &File, other: &File) -> Vec<u64> {
    let [mut a, mut b] = [(); 2].map(|()| vec![0; 1 << 20]);
    let mut pages = Vec::new();
    for at in (0..MEMORY).step_by(1 << 20) {
        one.read_exact_at(&mut a, at).unwrap();
        other.read_exact_at(&mut b, at).unwrap();
        let unequal = a.chunks(PAGE).zip(b.chunks(PAGE)).enumerate().filter(|(_, (a, b))| a != b);
        pages.extend(unequal.map(|(page, _)| at / PAGE as u64 + page as u64));
    }
    pages
}

#[test]
fn all_pages_of_both_sides_are_equal_at_the_handover() {
    let mut pair = Pair::start("eq", "");
    assert_eq!(pair.moves(), [] as [u64; 0]);
}

#[test]
fn pages_differ_if_those_that_vcpus_write_are_not_noted() {
    let mut pair = Pair::start("kv", "vCPUs");
    assert!(pair.moves().contains(&(u64::from(COUNTER) / PAGE as u64)));
}

#[test]
fn pages_differ_if_those_that_own_threads_write_are_not_noted() {
    let mut pair = Pair::start("ow", "devices");
    let pages = pair.moves();
    assert!(pages.contains(&(u64::from(RINGS_AT + 0x2000) / PAGE as u64)), "{pages:?}");
    assert!(pages.iter().all(|page| *page * (PAGE as u64) < u64::from(BUFFERS_AT + BUFFERS_OF_NIC)), "{pages:?}");
}

#[test]
fn pages_differ_if_vhost_user_backend_writes_are_not_logged() {
    let mut pair = Pair::start("us", "vhost-user");
    let pages = pair.moves();
    assert!(pages.contains(&(u64::from(RINGS_AT + RINGS_OF_NIC + 0x2000) / PAGE as u64)), "{pages:?}");
    assert!(pages.iter().all(|page| *page * (PAGE as u64) >= u64::from(RINGS_AT + RINGS_OF_NIC)), "{pages:?}");
}
