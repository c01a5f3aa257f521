//! Requests that wait for others, and requests that do not.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use vmm::api::{Action, MOST_WORKERS, Reply};

use crate::client::{plain, request, serve};

/// The names of this process's threads.
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let comm = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    comm.map(|name| name.trim().to_string()).collect()
}

#[test]
fn threads_have_names() {
    let server = serve(plain);
    assert_eq!(server.ask("GET", "/api/v1/vmm.ping", "").status, 200);
    // A thread sets its own name, and another thread may have answered before that.
    let deadline = Instant::now() + Duration::from_secs(5);
    let is_there = |expected: &&str| threads().iter().any(|name| name == expected);
    while !["http-server", "http-0"].iter().all(is_there) {
        assert!(Instant::now() < deadline, "{:?}", threads());
        std::thread::yield_now();
    }
}

#[test]
fn a_slow_action_delays_no_other_client() {
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let opened = gate.clone();
    let server = serve(move |action| {
        if matches!(action, Action::Boot) {
            let mut open = opened.0.lock();
            opened.1.wait_while(&mut open, |open| !*open);
        }
        plain(action)
    });
    let mut slow: Vec<_> = (0..MOST_WORKERS - 1).map(|_| server.client()).collect();
    for client in &mut slow {
        client.send(request("PUT", "/api/v1/vm.boot", ""));
    }
    assert_eq!(server.ask("GET", "/api/v1/vmm.ping", "").status, 200);
    *gate.0.lock() = true;
    gate.1.notify_all();
    assert!(slow.iter_mut().all(|client| client.answer().status == 204));
}

#[test]
fn requests_beyond_the_number_of_workers_get_their_turn() {
    let barrier = Arc::new(Barrier::new(MOST_WORKERS));
    let together = barrier.clone();
    let server = serve(move |action| {
        if matches!(action, Action::Boot) {
            together.wait();
        }
        plain(action)
    });
    let mut clients: Vec<_> = (0..MOST_WORKERS + 20).map(|_| server.client()).collect();
    for client in &mut clients[..MOST_WORKERS - 1] {
        client.send(request("PUT", "/api/v1/vm.boot", ""));
    }
    for client in &mut clients[MOST_WORKERS..] {
        client.send(request("GET", "/api/v1/vmm.ping", ""));
    }
    assert!(clients[MOST_WORKERS..].iter_mut().all(|client| client.answer().status == 200));
    clients[MOST_WORKERS - 1].send(request("PUT", "/api/v1/vm.boot", ""));
    assert!(clients[..MOST_WORKERS].iter_mut().all(|client| client.answer().status == 204));
}

#[test]
fn an_action_in_progress_is_answered_before_the_server_ends() {
    let begun = Arc::new(Barrier::new(2));
    let seen = begun.clone();
    let server = serve(move |_| {
        seen.wait();
        std::thread::sleep(Duration::from_millis(300));
        Ok(Reply::Ok)
    });
    let (mut client, mut idle, mut half) = (server.client(), server.client(), server.client());
    half.send("PUT /api/v1/vm.boot HTTP/1.1\r\nHost");
    client.send(request("PUT", "/api/v1/vmm.shutdown", ""));
    begun.wait();
    drop(server.server);
    assert_eq!(client.answer().status, 200);
    assert!(client.is_closed() && idle.is_closed());
    assert!(half.try_answer().is_none());
    assert!(std::os::unix::net::UnixStream::connect(&server.path).is_err());
}

#[test]
fn a_server_ends_at_once_when_nothing_is_under_way() {
    let server = serve(plain);
    let clients: Vec<_> = (0..50).map(|_| server.client()).collect();
    assert_eq!(server.ask("GET", "/api/v1/vmm.ping", "").status, 200);
    let started = Instant::now();
    drop(server);
    assert!(started.elapsed() < Duration::from_secs(1));
    drop(clients);
}

#[test]
fn large_reply_in_progress_is_finished_before_server_shutdown() {
    let begun = Arc::new(Barrier::new(2));
    let seen = begun.clone();
    let text = format!("\"{}\"", "x".repeat(2 << 20));
    let reply = text.clone();
    let server = serve(move |_| {
        seen.wait();
        std::thread::sleep(Duration::from_millis(100));
        Ok(Reply::Json(reply.clone()))
    });
    let mut client = server.client();
    client.send(request("GET", "/api/v1/vm.info", ""));
    begun.wait();
    let end = std::thread::spawn(move || drop(server.server));
    assert_eq!(client.answer().body, text);
    end.join().unwrap();
}
