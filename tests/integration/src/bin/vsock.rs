//! A guest's end of a connection over AF_VSOCK. The other end is a test's, over the VMM's Unix sockets.
//!
//! `vsock listen PORT BYTES` accepts one connection, `vsock connect PORT BYTES` makes one to the host. Both then send
//! `BYTES` bytes of a pattern, close their direction, and check that the other side sends the same and closes its
//! direction. They print `same BYTES`.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed check panics and says where")]

use std::fs::File;
use std::io::{Read, Write};
use std::thread;

use integration::{VmListener, connect_to_host, end_writing, pattern};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [role, port, bytes] = arguments.as_slice() else { panic!("vsock listen|connect PORT BYTES") };
    let (port, bytes) = (port.parse().unwrap(), bytes.parse().unwrap());
    let connection = if role == "listen" { accept(port) } else { connect_to_host(port).unwrap() };
    exchange(&connection, bytes);
    println!("same {bytes}");
}

fn accept(port: u32) -> File {
    let listener = VmListener::bind(port).unwrap();
    println!("listening");
    listener.accept().unwrap()
}

/// Sends `bytes` bytes, and reads the same number at the same time.
fn exchange(connection: &File, bytes: usize) {
    let mut sender = connection.try_clone().unwrap();
    let sending = thread::spawn(move || {
        for part in 0..bytes.div_ceil(pattern::PART) {
            sender.write_all(&pattern::part(part, bytes)).unwrap();
        }
        end_writing(&sender).unwrap();
    });
    let mut receiver = connection;
    pattern::check(&mut receiver, bytes);
    assert_eq!(receiver.read(&mut [0]).unwrap(), 0, "the end, after all of it");
    sending.join().unwrap();
}
