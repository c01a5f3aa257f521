//! Live migration over encrypted connections, and with untrusted peers.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::certificates::Authority;
use crate::migration::{counts, progress, receive_by, source, wait_for_state};
use crate::rig::client::Client;
use crate::rig::vmm::{Vmm, reasons, wait_for};

/// A folder with the certificates of both sides.
fn certificates(vmm: &Vmm, name: &str, authority: &Authority) -> Value {
    let folder = vmm.files.path(name);
    fs::create_dir(&folder).unwrap();
    authority.write(&folder, &["localhost"]);
    json!(folder)
}

/// A target that waits on its own port.
fn receive(target: &Vmm, port: u32, tls_dir: &Value) -> Client {
    receive_by(target, &json!({"receiver_url": format!("tcp:127.0.0.1:{port}"), "tls_dir": tls_dir}))
}

fn send(client: &mut Client, port: u32, tls_dir: &Value) {
    let body = json!({"destination_url": format!("tcp:localhost:{port}"), "connections": 3, "tls_dir": tls_dir});
    client.put_json("vm.send-migration", &body).expect(204);
}

#[test]
fn a_guest_moves_over_tls_and_untrusted_peers_are_refused() {
    let port = 10_000 + std::process::id() % 1_900;
    let (vmm, mut client) = source();
    let (one, other) = (Authority::new("one"), Authority::new("other"));
    let good = certificates(&vmm, "good", &one);
    let foreign = certificates(&vmm, "foreign", &other);
    // It trusts the target, which does not trust it.
    let stranger = certificates(&vmm, "stranger", &other);
    fs::copy(vmm.files.path("good/ca-cert.pem"), vmm.files.path("stranger/ca-cert.pem")).unwrap();
    let expired = certificates(&vmm, "expired", &one);
    one.certify(Path::new(expired.as_str().unwrap()), "client", &["source"], true);
    let target = Vmm::start();
    let mut there = receive(&target, port, &good);
    for (tls_dir, said) in [
        (&foreign, "UnknownIssuer"),
        (&stranger, "UnknownCA"),
        (&expired, "CertificateExpired"),
        (&Value::Null, "if it was given a tls_dir, give this side one, too"),
    ] {
        send(&mut client, port, tls_dir);
        let ended = wait_for_state(&mut client, "failed");
        let error = ended["error"].as_str().unwrap();
        println!("{tls_dir}: {error}");
        assert!(error.contains(said) && !error.contains('\n'), "{tls_dir}: {error}");
        assert_eq!(progress(&mut there)["phase"], "listening", "{tls_dir}");
    }
    assert!(counts(&vmm));
    send(&mut client, port, &good);
    wait_for_state(&mut there, "finished");
    let sent = wait_for_state(&mut client, "finished");
    println!("{sent}");
    assert!(counts(&target));
    // A source with certificates does not accept a target without them.
    let plain = Vmm::start();
    let mut waits = receive(&plain, port + 1, &Value::Null);
    send(&mut there, port + 1, &good);
    let ended = wait_for_state(&mut there, "failed");
    assert!(ended["error"].as_str().unwrap().contains("TLS: the peer"), "{ended}");
    assert_eq!(progress(&mut waits)["phase"], "listening");
    assert!(counts(&target));
}

#[test]
fn unusable_certificates_are_named_before_a_migration_starts() {
    let (vmm, mut client) = source();
    let target = Vmm::start();
    let mut there = target.client();
    let good = certificates(&vmm, "good", &Authority::new("one"));
    fs::remove_file(vmm.files.path("good/client-key.pem")).unwrap();
    fs::write(vmm.files.path("good/server-cert.pem"), "nothing").unwrap();
    let answer = client.put_json("vm.send-migration", &json!({"destination_url": "tcp:h:1", "tls_dir": good}));
    assert!(reasons(&answer)[1].contains("/good: client-key.pem: No such file"), "{answer:?}");
    answer.expect(400);
    let body = json!({"receiver_url": "tcp:127.0.0.1:1", "tls_dir": good});
    let answer = there.put_json("vm.receive-migration", &body);
    assert!(reasons(&answer)[1].contains("/good: server-cert.pem: it has no certificate"), "{answer:?}");
    answer.expect(400);
    for (client, endpoint, key) in
        [(&mut client, "vm.send-migration", "destination_url"), (&mut there, "vm.receive-migration", "receiver_url")]
    {
        let answer = client.put_json(endpoint, &json!({key: "unix:/m", "tls_dir": good}));
        assert!(reasons(&answer)[1].contains("a Unix socket is not encrypted"), "{answer:?}");
        answer.expect(400);
    }
    wait_for("the guest", || counts(&vmm));
}
