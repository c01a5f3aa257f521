//! Live migration while peers that are not a source connect to the target.

use std::fs;
use std::net::TcpStream;

use serde_json::{Value, json};

use crate::certificates::Authority;
use crate::migration::{counts, receive_by, source, wait_for_state};
use crate::rig::vmm::Vmm;

/// Moves a guest while this many silent connections to the target stay open. Returns the time that it took, in
/// milliseconds.
fn moves_beside(strangers: usize, port: u32, tls_dir: &Value) -> u64 {
    let (_source, mut client) = source();
    let target = Vmm::start();
    let mut there = receive_by(&target, &json!({"receiver_url": format!("tcp:127.0.0.1:{port}"), "tls_dir": tls_dir}));
    let strangers: Vec<_> = (0..strangers).map(|_| TcpStream::connect(("127.0.0.1", port as u16)).unwrap()).collect();
    let body = json!({"destination_url": format!("tcp:localhost:{port}"), "connections": 3, "tls_dir": tls_dir});
    client.put_json("vm.send-migration", &body).expect(204);
    let ended = wait_for_state(&mut client, "finished");
    wait_for_state(&mut there, "finished");
    assert!(counts(&target));
    drop(strangers);
    ended["elapsed_ms"].as_u64().unwrap()
}

/// The target has fewer slots than 100.
#[test]
fn a_hundred_silent_connections_delay_a_migration_by_a_second() {
    let port = 22_000 + std::process::id() % 9_000;
    let mut seen = Vec::new();
    // A busy machine may take that second, but not each time.
    for attempt in 0..10 {
        let alone = moves_beside(0, port + 2 * attempt, &Value::Null);
        let beside = moves_beside(100, port + 2 * attempt + 1, &Value::Null);
        println!("{alone} ms alone, {beside} ms with 100");
        if beside <= alone + 1000 {
            return;
        }
        seen.push((alone, beside));
    }
    panic!("alone and with 100 connections, in ms: {seen:?}");
}

#[test]
fn a_guest_moves_encrypted_beside_a_hundred_silent_connections() {
    let folder = tempfile::tempdir().unwrap();
    Authority::new("one").write(folder.path(), &["localhost"]);
    let tls_dir = fs::canonicalize(folder.path()).unwrap();
    moves_beside(100, 12_000 + std::process::id() % 10_000, &json!(tls_dir));
}
