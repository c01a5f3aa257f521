//! Live migration while peers that are not a source connect to the target.

use std::fs;
use std::net::TcpStream;

use serde_json::{Value, json};

use crate::certificates::Authority;
use crate::migration::{counts, receive_by, source, wait_for_state};
use crate::vmm::Vmm;

/// More connections than the target has slots, each of them silent while the guest migrates.
fn moves_beside_strangers(port: u32, tls_dir: &Value) {
    let (_source, mut client) = source();
    let target = Vmm::start();
    let mut there = receive_by(&target, &json!({"receiver_url": format!("tcp:127.0.0.1:{port}"), "tls_dir": tls_dir}));
    let strangers: Vec<_> = (0..100).map(|_| TcpStream::connect(("127.0.0.1", port as u16)).unwrap()).collect();
    let body = json!({"destination_url": format!("tcp:localhost:{port}"), "connections": 3, "tls_dir": tls_dir});
    client.put_json("vm.send-migration", &body).expect(204);
    wait_for_state(&mut client, "finished");
    wait_for_state(&mut there, "finished");
    assert!(counts(&target));
    drop(strangers);
}

/// The source gives up after 8 s. Each stranger had 5 s.
#[test]
fn a_guest_moves_beside_a_hundred_silent_connections() {
    moves_beside_strangers(22_000 + std::process::id() % 10_000, &Value::Null);
}

#[test]
fn a_guest_moves_encrypted_beside_a_hundred_silent_connections() {
    let folder = tempfile::tempdir().unwrap();
    Authority::new("one").write(folder.path(), &["localhost"]);
    let tls_dir = fs::canonicalize(folder.path()).unwrap();
    moves_beside_strangers(12_000 + std::process::id() % 10_000, &json!(tls_dir));
}
