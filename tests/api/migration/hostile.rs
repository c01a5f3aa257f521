//! An untrusted source of a local migration: it repeats a real source's offer, and passes other descriptors.

use std::fs;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde_json::{Value, json};
use vmm::migration::incoming::{Incoming, Item};
use vmm::migration::wire::{Features, Frame, GREETING, Greeting, MAX_PART, OLDEST, Part, Role, VERSION};

use crate::migration::{config, counts, dots, receive, url, wait_for_state};
use crate::rig::client::Client;
use crate::rig::vmm::{BINARY, Vmm, wait_for};

/// The offer of a real source, and the descriptors that it passed.
struct Recorded {
    offer: Value,
    fds: Vec<OwnedFd>,
}

/// A VMM whose guest counts in memory that can be passed.
fn source(memory: Value) -> (Vmm, Client) {
    let mut command = Command::new(BINARY);
    command.arg("--no-shutdown");
    let vmm = Vmm::of(command);
    let mut config = config(&vmm);
    config["memory"] = memory;
    let client = vmm.boot_config(&config);
    wait_for("the guest", || dots(&vmm) > 2);
    (vmm, client)
}

/// Migrates the guest of `vmm` to this program, which takes the offer and returns the guest.
fn record(vmm: &Vmm, client: &mut Client) -> Recorded {
    let path = vmm.files.path("recorder");
    let listener = UnixListener::bind(&path).unwrap();
    let body = json!({"destination_url": format!("unix:{}", path.display()), "local": true});
    client.put_json("vm.send-migration", &body).expect(204);
    let (control, _) = listener.accept().unwrap();
    let mut incoming = Incoming::new(&control);
    let greeting = incoming.greeting().unwrap();
    (&control).write_all(&greeting.bytes()).unwrap();
    let mut offer = Vec::new();
    loop {
        let Item::Frame(frame) = incoming.receive().unwrap() else { panic!("pages") };
        if let Frame::Offer(Part { is_last, bytes }) = frame {
            offer.extend(bytes);
            if is_last {
                break;
            }
        }
    }
    let (mut passing, _) = listener.accept().unwrap();
    passing.read_exact(&mut [0; GREETING]).unwrap();
    let mut count = [0; 4];
    passing.read_exact(&mut count).unwrap();
    let mut fds = Vec::new();
    while fds.len() < u32::from_le_bytes(count) as usize {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let (mut ancillary, mut byte) = (RecvAncillaryBuffer::new(&mut space), [0]);
        recvmsg(&passing, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC).unwrap();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = message {
                fds.extend(some);
            }
        }
    }
    drop((control, passing, listener));
    fs::remove_file(path).unwrap();
    wait_for_state(client, "failed");
    Recorded { offer: serde_json::from_slice(&offer).unwrap(), fds }
}

fn greet(target: &Vmm, role: Role) -> UnixStream {
    let mut stream = UnixStream::connect(target.files.path("migration")).unwrap();
    let (features, session) = (Features::LOCAL, [3; 16]);
    let greeting = Greeting { version: VERSION, oldest: OLDEST, role, connections: 1, features, session };
    stream.write_all(&greeting.bytes()).unwrap();
    stream
}

/// Sends this offer to `target`, announces this number of descriptors, and passes `fds`. Returns the reason for a
/// refusal.
fn offer(target: &Vmm, offer: &Value, announced: u32, fds: &[OwnedFd]) -> Option<String> {
    let mut there = receive(target, &url(target));
    let control = greet(target, Role::Control);
    let mut incoming = Incoming::new(&control);
    incoming.greeting().unwrap();
    let mut passing = greet(target, Role::Pages(0));
    passing.write_all(&announced.to_le_bytes()).unwrap();
    if !fds.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let some: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&some)));
        sendmsg(&passing, &[IoSlice::new(&[fds.len() as u8])], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
    }
    let bytes = offer.to_string().into_bytes();
    let parts: Vec<_> = bytes.chunks(MAX_PART).collect();
    for (index, part) in parts.iter().enumerate() {
        let frame = Frame::Offer(Part { is_last: index + 1 == parts.len(), bytes: part.to_vec() });
        (&control).write_all(&frame.bytes()).unwrap();
    }
    let refused = loop {
        match incoming.receive().unwrap() {
            Item::Frame(Frame::Failed(line)) => break Some(line),
            Item::Frame(Frame::Prepared) => break None,
            _ => {}
        }
    };
    drop((control, passing));
    wait_for_state(&mut there, "failed");
    there.get("vm.info").expect(404);
    refused
}

/// Memory of `len` bytes with these seals.
fn memory(len: u64, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("hostile", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

#[test]
fn passed_memory_that_can_shrink_is_refused() {
    let (vmm, mut client) = source(json!({"size": 64 << 20, "shared": true}));
    let Recorded { offer: recorded, fds } = record(&vmm, &mut client);
    let target = Vmm::start();
    assert_eq!((fds.len(), recorded["passed"]["memory"].as_array().unwrap().len()), (1, 1));
    for seals in [SealFlags::empty(), SealFlags::GROW] {
        let said = offer(&target, &recorded, 1, &[memory(64 << 20, seals)]).unwrap();
        assert!(said.contains("could make shorter") && said.contains("F_SEAL_SHRINK"), "{said}");
    }
    assert_eq!(offer(&target, &recorded, 1, &[memory(64 << 20, SealFlags::SHRINK)]), None);
    // The real source's descriptors are sealed.
    assert_eq!(offer(&target, &recorded, 1, &fds), None);
    assert!(counts(&vmm));
}

#[test]
fn the_file_of_a_zone_is_taken_and_another_in_its_place_is_not() {
    const SIZE: u64 = 64 << 20;
    let vmm = Vmm::start();
    let file = vmm.files.sparse("zone", SIZE);
    let zones = json!([{"id": "z", "size": SIZE, "file": "zone", "shared": true}]);
    let mut config = config(&vmm);
    config["memory"] = json!({"size": 0, "zones": zones});
    let mut client = vmm.boot_config(&config);
    wait_for("the guest", || dots(&vmm) > 2);
    let Recorded { offer: recorded, fds } = record(&vmm, &mut client);
    let target = Vmm::start();
    let here = target.files.sparse("zone", SIZE);
    let said = offer(&target, &recorded, 1, &fds).unwrap();
    assert!(said.contains("could make shorter"), "{said}");
    fs::remove_file(&here).unwrap();
    std::os::unix::fs::symlink(file, here).unwrap();
    assert_eq!(offer(&target, &recorded, 1, &fds), None);
}

#[test]
fn descriptors_beyond_those_of_the_configuration_are_refused() {
    let (vmm, mut client) = source(json!({"size": 64 << 20, "shared": true}));
    let Recorded { offer: recorded, fds } = record(&vmm, &mut client);
    let target = Vmm::start();
    // After its first reply, its server has all of its own files.
    target.client().get("vmm.ping").expect(200);
    let files = target.open_files();
    let said = offer(&target, &recorded, u32::MAX, &fds).unwrap();
    assert!(said.contains("4294967295 were announced, and 1 were offered"), "{said}");
    let mut more = recorded.clone();
    let tap = |id: &str| json!({"of": {"id": id, "vf": null, "uplink": false}, "queues": 65535, "offloads": 0});
    more["passed"]["taps"] = json!((0..100).map(|index| tap(&format!("n{index}"))).collect::<Vec<_>>());
    let said = offer(&target, &more, 6_553_501, &fds).unwrap();
    assert!(said.contains("passes a tap that n0 does not have"), "{said}");
    let mut more = recorded.clone();
    more["passed"]["memory"] = json!(vec![recorded["passed"]["memory"][0].clone(); 1000]);
    let said = offer(&target, &more, 1000, &fds).unwrap();
    assert!(said.contains("passes 1000 parts of memory; a guest has at most 64"), "{said}");
    wait_for("its files", || target.open_files() <= files + 1);
    assert!(counts(&vmm));
}
