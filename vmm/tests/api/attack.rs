//! Hostile clients: the server keeps running, its memory and descriptors stay bounded, and other clients are served.

use std::os::unix::net::UnixStream;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use vmm::api::{MOST_BODY, MOST_CONNECTIONS, MOST_HEAD, Reply};

use crate::client::{Client, Fixture, Probe, plain, request, serve, serve_with};

/// Asserts that another client is served without delay.
fn assert_serves(server: &Fixture) {
    let started = Instant::now();
    assert_eq!(server.ask("GET", "/api/v1/vmm.ping", "").status, 200);
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
}

#[test]
fn a_head_that_is_too_large_is_refused() {
    let server = serve(plain);
    for head in [
        format!("GET /{} HTTP/1.1\r\nHost: x\r\n\r\n", "a".repeat(MOST_HEAD)),
        format!("GET / HTTP/1.1\r\nHost: x\r\nX: {}\r\n\r\n", "a".repeat(MOST_HEAD)),
        format!("GET / HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(65)),
    ] {
        let mut client = server.client();
        client.send(head);
        let answer = client.answer();
        assert_eq!(answer.status, 431, "{answer:?}");
        assert_eq!(answer.header("Connection"), Some("close"));
        assert_eq!(answer.chain(), ["the request line and headers exceed 16384 bytes or 64 headers"]);
        assert!(client.is_closed());
    }
    assert_serves(&server);
}

#[test]
fn an_endless_head_is_refused_when_it_is_too_large() {
    let server = serve(plain);
    let mut client = server.client();
    client.send(vec![b'a'; MOST_HEAD * 2]);
    assert!(matches!(client.answer().status, 400 | 431));
    assert_serves(&server);
}

#[test]
fn the_largest_body_is_read_and_a_larger_one_refused() {
    let server = serve(plain);
    let body = |length: usize| format!("{{\"id\":\"{}\"}}", "x".repeat(length - 9));
    assert_eq!(server.ask("PUT", "/api/v1/vm.remove-device", &body(MOST_BODY)).status, 204);
    let mut client = server.client();
    for length in [MOST_BODY + 1, 3 * MOST_BODY] {
        client = server.client();
        client.send(request("PUT", "/api/v1/vm.remove-device", &body(length)));
        let answer = client.answer();
        assert_eq!((answer.status, answer.chain()), (400, vec!["the body is larger than 4 MiB".to_string()]));
    }
    assert!(client.is_closed());
    assert_eq!(server.asked().len(), 1);
    assert_serves(&server);
}

#[test]
fn expect_100_continue_is_refused_for_a_too_large_body() {
    let server = serve(plain);
    let mut client = server.client();
    client.send(
        "PUT /api/v1/vm.resize HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n",
    );
    assert_eq!(client.answer().status, 400);
    assert!(client.is_closed());
}

#[test]
fn an_endless_chunked_body_is_refused() {
    let server = serve(plain);
    let mut client = server.client();
    client.send("PUT /api/v1/vm.resize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n");
    let chunk = format!("{:x}\r\n{}\r\n", 1 << 20, " ".repeat(1 << 20));
    // The server stops reading at some point.
    for _ in 0..80 {
        if std::io::Write::write_all(&mut client.0, chunk.as_bytes()).is_err() {
            break;
        }
    }
    assert_eq!(client.answer().status, 400);
    assert_serves(&server);
}

#[test]
fn malformed_requests_are_refused() {
    let server = serve(plain);
    for text in [
        "PUT /api/v1/vm.resize HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        "PUT /api/v1/vm.resize HTTP/1.1\r\nHost: x\r\nContent-Length: -2\r\n\r\n{}",
        "PUT /api/v1/vm.resize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        "PUT /api/v1/vm.resize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n{}",
        "PUT /api/v1/vm.resize HTTP/9.1\r\nHost: x\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET /\u{1F980} HTTP/1.1\r\nHost: x\r\nA b: c\r\n\r\n",
        "\0\0\0\0\r\n\r\n",
    ] {
        let mut client = server.client();
        client.send(text);
        let answer = client.answer();
        assert_eq!(answer.status, 400, "{text}: {answer:?}");
        assert!(!answer.chain()[0].is_empty());
        assert!(client.is_closed(), "{text}");
    }
    assert!(server.asked().is_empty());
    assert_serves(&server);
}

#[test]
fn half_requests_delay_no_other_client() {
    let server = serve(plain);
    let mut half: Vec<_> = (0..100).map(|_| server.client()).collect();
    for client in &mut half {
        client.send("PUT /api/v1/vm.resize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{");
    }
    assert_serves(&server);
    // The half requests can still be completed.
    let mut last = half.pop().unwrap();
    last.send(" ".repeat(98));
    last.send("}");
    assert_eq!(last.answer().status, 204);
}

#[test]
fn a_half_request_times_out_and_an_idle_connection_does_not() {
    let server = serve_with(Duration::from_millis(300), plain);
    let (mut idle, mut half, mut late) = (server.client(), server.client(), server.client());
    assert_eq!(late.ask("GET", "/api/v1/vmm.ping", "").status, 200);
    let probe = Probe::new();
    half.send_with("PUT /api/v1/vm.add-net HTTP/1.1\r\nContent-Length: 9\r\n\r\n{", &[probe.fd()]);
    late.send("GET /api/v1/vmm.ping HT");
    assert!(half.try_answer().is_none() && late.try_answer().is_none());
    assert!(probe.closes_everywhere());
    assert_eq!(idle.ask("GET", "/api/v1/vmm.ping", "").status, 200);
}

#[test]
fn a_half_request_sent_together_with_a_whole_one_times_out_too() {
    let half = "GET /api/v1/vmm.ping HT";
    let server = serve_with(Duration::from_millis(300), |action| {
        // Give the half request time to arrive.
        std::thread::sleep(Duration::from_millis(100));
        plain(action)
    });
    let mut client = server.client();
    client.send(request("GET", "/api/v1/vmm.ping", ""));
    std::thread::sleep(Duration::from_millis(50));
    client.send(half);
    assert_eq!(client.answer().status, 200);
    assert!(client.try_answer().is_none());
    // An invalid request is refused, however early it arrives.
    let mut client = server.client();
    client.send(request("GET", "/api/v1/vmm.ping", ""));
    std::thread::sleep(Duration::from_millis(50));
    client.send("no request\r\n\r\n");
    let mut text = String::new();
    std::io::Read::read_to_string(&mut client.0, &mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 \r\n") && text.contains("HTTP/1.1 400 \r\n"), "{text}");
}

#[test]
fn a_client_that_does_not_read_its_answer_is_dropped() {
    let server = serve_with(Duration::from_millis(300), |_| Ok(Reply::Json(format!("\"{}\"", "x".repeat(8 << 20)))));
    let mut client = server.client();
    client.send(request("GET", "/api/v1/vm.info", ""));
    std::thread::sleep(Duration::from_secs(2));
    let mut taken = Vec::new();
    std::io::Read::read_to_end(&mut client.0, &mut taken).unwrap();
    assert!(taken.len() < 8 << 20, "{}", taken.len());
}

#[test]
fn a_thousand_idle_connections_leave_room_for_others() {
    let server = serve(plain);
    let mut regular = server.client();
    assert_eq!(regular.ask("GET", "/api/v1/vmm.ping", "").status, 200);
    let idle: Vec<_> = (0..1000).map(|_| UnixStream::connect(&server.path).unwrap()).collect();
    assert_serves(&server);
    let is_open = |stream: &&UnixStream| {
        stream.set_nonblocking(true).unwrap();
        !matches!(std::io::Read::read(&mut &**stream, &mut [0; 1]), Ok(0))
    };
    let open = idle.iter().filter(is_open).count();
    assert!((1..MOST_CONNECTIONS).contains(&open), "{open}");
    // The connections that never sent a request were closed first.
    assert_eq!(regular.ask("GET", "/api/v1/vmm.ping", "").status, 200);
    drop(idle);
    assert_serves(&server);
}

/// Clients that keep their connections after an answer: the most that the server accepts.
fn answered(server: &Fixture) -> Vec<Client> {
    let ask = |_| {
        let mut client = server.client();
        assert_eq!(client.ask("GET", "/api/v1/vmm.ping", "").status, 200);
        client
    };
    (0..MOST_CONNECTIONS - 1).map(ask).collect()
}

#[test]
fn idle_clients_that_were_answered_lock_no_client_out() {
    let server = serve(plain);
    let idle = answered(&server);
    for _ in 0..3 {
        let mut late = server.client();
        // The server has accepted this client, and waits for the next one.
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(late.ask("GET", "/api/v1/vmm.ping", "").status, 200);
        assert_eq!(late.ask("GET", "/api/v1/vmm.ping", "").status, 200);
    }
    drop(idle);
}

#[test]
fn clients_that_come_together_are_all_answered() {
    let server = serve(plain);
    let idle = answered(&server);
    let start = Barrier::new(MOST_CONNECTIONS);
    for _ in 0..3 {
        std::thread::scope(|scope| {
            for _ in 0..MOST_CONNECTIONS {
                scope.spawn(|| {
                    start.wait();
                    assert_eq!(server.client().ask("GET", "/api/v1/vmm.ping", "").status, 200);
                });
            }
        });
    }
    drop(idle);
}

#[test]
fn only_two_large_bodies_are_read_at_a_time() {
    let server = serve(plain);
    let head = |length: usize| format!("PUT /api/v1/vm.resize HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n");
    let mut holders = [server.client(), server.client()];
    for client in &mut holders {
        client.send(head(1 << 20));
        client.send(" ".repeat(200 << 10));
    }
    // Give these two time to count as large; otherwise a third one could take a permit of theirs.
    std::thread::sleep(Duration::from_secs(1));
    let answer = server.ask("PUT", "/api/v1/vm.resize", &format!("{}{{}}", " ".repeat(200 << 10)));
    assert_eq!(answer.status, 429, "{answer:?}");
    assert_eq!(server.ask("PUT", "/api/v1/vm.resize", "{}").status, 204);
    for mut client in holders {
        client.send(" ".repeat((1 << 20) - (200 << 10) - 2));
        client.send("{}");
        assert_eq!(client.answer().status, 204);
    }
    assert_eq!(server.ask("PUT", "/api/v1/vm.resize", &format!("{}{{}}", " ".repeat(200 << 10))).status, 204);
}

#[test]
fn a_client_that_reads_no_answers_is_no_longer_answered() {
    let server = serve(plain);
    let mut client = server.client();
    client.0.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    let many = request("GET", "/api/v1/nothing", "").repeat(1000);
    let mut sent = 0;
    while sent < 100 && std::io::Write::write_all(&mut client.0, many.as_bytes()).is_ok() {
        sent += 1;
    }
    assert!(sent < 100, "the server buffers answers that the client never reads");
    assert_serves(&server);
}

#[test]
fn clients_that_come_and_go_leak_nothing() {
    let server = serve(plain);
    let probe = Probe::new();
    assert_serves(&server);
    for round in 0..300 {
        let mut client = Client(UnixStream::connect(&server.path).unwrap());
        match round % 3 {
            0 => {}
            1 => client.send_with("PUT /api/v1/vm.add-net HT", &[probe.fd()]),
            _ => client.send(request("GET", "/api/v1/vm.info", "")),
        }
    }
    assert!(probe.closes_everywhere());
    assert_serves(&server);
}
