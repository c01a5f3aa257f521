//! The socket for readers.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use vmm::api::{Clients, MOST_READERS, PATIENCE, ROUTES, Reply};

use crate::client::{plain, request, serve_clients};

#[test]
fn readers_get_information_and_change_nothing() {
    let server = serve_clients(Clients::Readers, PATIENCE, plain);
    for route in ROUTES.iter() {
        let answer = server.ask(route.method, route.path, "");
        if route.method == "GET" {
            assert!([200, 204].contains(&answer.status), "{route:?}");
            continue;
        }
        let name = route.path.rsplit('/').next().unwrap();
        assert_eq!(answer.status, 403, "{route:?}");
        assert_eq!(answer.chain(), [format!("{name}: this socket is read-only; use the socket of --api-socket")]);
    }
    assert_eq!(server.asked(), ["Ping", "Info", "Counters", "MigrationProgress", "Metrics"]);
    for (method, path, status) in [
        ("POST", "/api/v1/vm.boot", 405),
        ("PUT", "/api/v1/vm.info", 405),
        ("DELETE", "/api/v1/vm.shutdown", 405),
        ("PUT", "/api/v1/vm.boot?x=y", 404),
        ("PUT", "//api/v1/vm.boot", 404),
        ("GET", "/api/v1/vm.nothing", 404),
    ] {
        assert_eq!(server.ask(method, path, "").status, status, "{method} {path}");
    }
    let refused = server.ask("PUT", "/api/v1/vm.create", r#"{"payload": {"kernel": "k"}}"#);
    assert_eq!(refused.status, 403);
    assert_eq!(server.asked().len(), 5, "no other action");
}

#[test]
fn readers_do_not_get_the_guests_secrets() {
    let info = r#"{"config":{"payload":{"cmdline":"secret","kernel":"k"},"platform":{"oem_strings":["secret"]}}}"#;
    let answer = |clients| {
        let server = serve_clients(clients, PATIENCE, move |_| Ok(Reply::Json(info.to_string())));
        server.ask("GET", "/api/v1/vm.info", "").body
    };
    assert_eq!(answer(Clients::All), info);
    assert_eq!(answer(Clients::Readers), r#"{"config":{"payload":{"kernel":"k"},"platform":{}}}"#);
}

/// Each request waits for a second one to be performed in the meantime, for a while.
#[test]
fn readers_have_one_request_performed_at_a_time() {
    let (performed, changed) = (Mutex::new((0, 0)), Condvar::new());
    let server = serve_clients(Clients::Readers, PATIENCE, move |action| {
        let mut now = performed.lock();
        now.0 += 1;
        now.1 = now.1.max(now.0);
        changed.notify_all();
        changed.wait_while_for(&mut now, |(_, most)| *most < 2, Duration::from_millis(200));
        now.0 -= 1;
        assert_eq!(now.1, 1);
        plain(action)
    });
    let mut clients: Vec<_> = (0..4).map(|_| server.client()).collect();
    clients.iter_mut().for_each(|client| client.send(request("GET", "/metrics", "")));
    assert!(clients.iter_mut().all(|client| client.answer().status == 200));
}

#[test]
fn idle_readers_give_way_to_further_ones() {
    let server = Arc::new(serve_clients(Clients::Readers, PATIENCE, plain));
    let mut idle: Vec<_> = (0..MOST_READERS).map(|_| server.client()).collect();
    assert!(idle.iter_mut().all(|client| client.ask("GET", "/api/v1/vmm.ping", "").status == 200));
    assert_eq!(server.ask("GET", "/metrics", "").status, 200);
}
