//! A driver of VFs in a guest's program, over VFIO, which misbehaves in ways that no real driver does.
//!
//! - `vf_driver isolation VF NEIGHBOUR OWN HOST`: the VF uses buffers that are not its own. It is at `OWN` of a network
//!   whose other end is `HOST`, which answers its ARP requests.
//! - `vf_driver unmap VF ROUNDS OWN HOST`: pages are unmapped from the VF while it receives.
//! - `vf_driver hold VF`: the VF has buffers to receive into, until the program or the machine ends.
//!
//! A failed check is a panic. The test checks the other effects.

#![expect(clippy::unwrap_used, clippy::panic, clippy::expect_used, reason = "a failed check panics and says where")]

mod nic;
mod vfio;

use std::io::Write;
use std::net::Ipv4Addr;
use std::time::Duration;

use nic::{Nic, PAGE, RECEIVE, TRANSMIT, is_answer, question};
use vfio::{Access, Shared};

/// Pages that the VF may read and write, only read, only write, and a page of its neighbour.
const OWN: u64 = 0x4000_0000;
const READ_ONLY: u64 = 0x5000_0000;
const WRITE_ONLY: u64 = 0x5800_0000;
const NEIGHBOURS: u64 = 0x6000_0000;
/// Address that is not mapped for any function.
const NOWHERE: u64 = 0x7000_0000;
/// Content of pages that must not be written.
const CANARY: u8 = 0xc5;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["isolation", vf, neighbour, own, host] => isolation(vf, neighbour, &Network::new(own, host)),
        ["unmap", vf, rounds, own, host] => unmap(vf, rounds.parse().unwrap(), &Network::new(own, host)),
        ["hold", vf] => hold(vf),
        _ => panic!("usage: vf_driver isolation VF NEIGHBOUR OWN HOST | unmap VF ROUNDS OWN HOST | hold VF"),
    }
}

/// The addresses of a VF and of the host.
struct Network {
    own: Ipv4Addr,
    host: Ipv4Addr,
}

impl Network {
    fn new(own: &str, host: &str) -> Network {
        Network { own: own.parse().unwrap(), host: host.parse().unwrap() }
    }

    fn question(&self, nic: &Nic) -> Vec<u8> {
        question(nic.mac, self.own, self.host)
    }
}

/// A page full of canaries.
fn canaries() -> Shared {
    let page = Shared::memory(PAGE);
    page.fill(0, &[CANARY; PAGE]);
    page
}

fn is_untouched(page: Shared) -> bool {
    page.bytes(0, PAGE).iter().all(|byte| *byte == CANARY)
}

/// A NIC with a page to send from and one to receive into.
struct Station<'n> {
    nic: Nic,
    own: Shared,
    network: &'n Network,
    len: usize,
}

impl<'n> Station<'n> {
    fn new(vf: &str, network: &'n Network) -> Station<'n> {
        let (nic, own) = (Nic::start(vf), Shared::memory(2 * PAGE));
        nic.function.map(OWN, own, Access::Both);
        let question = network.question(&nic);
        own.fill(0, &question);
        Station { nic, own, network, len: question.len() }
    }

    /// Sends from `address`, and waits until that has succeeded or failed.
    fn send(&mut self, address: u64) {
        self.nic.post(TRANSMIT, address, self.len);
        self.nic.await_used(TRANSMIT);
    }

    /// Receives a reply into `address`, and waits until that has succeeded or failed. Returns the number of bytes
    /// received.
    fn receive(&mut self, address: u64) -> usize {
        self.nic.post(RECEIVE, address, PAGE);
        self.send(OWN);
        self.nic.await_used(RECEIVE)
    }

    /// Sends a request and receives a reply, in its own memory. The reply may be to an earlier request.
    fn assert_works(&mut self) {
        self.own.fill(PAGE, &[0; 64]);
        let len = self.receive(OWN + PAGE as u64);
        let packet = self.own.bytes(PAGE, len);
        assert!(is_answer(&packet, self.nic.mac, self.network.host, self.network.own), "{len} bytes: {packet:x?}");
    }

    /// Receives a reply into `page` at `address`. Returns true if it is to a request of `asker`.
    fn is_answered_in(&mut self, address: u64, page: Shared, asker: &Network) -> bool {
        let len = self.receive(address);
        is_answer(&page.bytes(0, len), self.nic.mac, asker.host, asker.own)
    }
}

fn isolation(vf: &str, neighbour: &str, network: &Network) {
    let mut station = Station::new(vf, network);
    let other = Nic::start(neighbour);
    let (read_only, write_only, neighbours) = (canaries(), canaries(), canaries());
    station.nic.function.map(READ_ONLY, read_only, Access::Read);
    station.nic.function.map(WRITE_ONLY, write_only, Access::Write);
    other.function.map(NEIGHBOURS, neighbours, Access::Both);
    station.assert_works();

    // The VF must not write there. The frame is lost, unnoticed by its sender.
    for (address, page) in [(READ_ONLY, Some(read_only)), (NEIGHBOURS, Some(neighbours)), (NOWHERE, None)] {
        assert_eq!(station.receive(address), 0, "{address:#x}");
        assert!(page.is_none_or(is_untouched), "{address:#x}");
        station.assert_works();
    }
    // The VF must not read there: it would send a request of another address, which would be answered.
    let somebody = Network { own: Ipv4Addr::from_bits(network.own.to_bits() + 1), host: network.host };
    let question = somebody.question(&station.nic);
    for page in [read_only, write_only, neighbours] {
        page.fill(0, &question);
    }
    for address in [WRITE_ONLY, NEIGHBOURS, NOWHERE] {
        station.send(address);
        for _ in 0..3 {
            station.assert_works();
        }
    }
    // The VF may read there, so the other address gets a reply; and it may write there.
    station.send(READ_ONLY);
    station.own.fill(PAGE, &[0; 64]);
    while !station.is_answered_in(WRITE_ONLY, write_only, &somebody) {}
    station.assert_works();
    println!("isolated {NEIGHBOURS:#x} {NOWHERE:#x} {READ_ONLY:#x} {WRITE_ONLY:#x}");
}

fn unmap(vf: &str, rounds: u32, network: &Network) {
    let mut station = Station::new(vf, network);
    station.assert_works();
    let page = canaries();
    let mut answered = 0;
    for round in 0..rounds {
        station.nic.function.map(NOWHERE, page, Access::Both);
        station.nic.post(RECEIVE, NOWHERE, PAGE);
        station.nic.post(TRANSMIT, OWN, station.len);
        // Before, during or after the reply, depending on the round.
        for _ in 0..round % 8 * 40 {
            std::hint::spin_loop();
        }
        station.nic.function.unmap(NOWHERE, PAGE);
        page.fill(0, &[CANARY; PAGE]);
        let len = station.nic.await_used(RECEIVE);
        station.nic.await_used(TRANSMIT);
        answered += u32::from(len > 0);
        assert!(is_untouched(page), "round {round}: written after it was taken away");
    }
    station.assert_works();
    println!("unmapped {rounds} times, answered before it {answered} times");
}

fn hold(vf: &str) {
    let network = Network::new("0.0.0.0", "0.0.0.0");
    let mut station = Station::new(vf, &network);
    for _ in 0..32 {
        station.nic.post(RECEIVE, OWN + PAGE as u64, PAGE);
    }
    println!("holding");
    std::io::stdout().flush().unwrap();
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}
