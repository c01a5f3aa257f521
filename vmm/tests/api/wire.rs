//! Details of the protocol that clients of Cloud Hypervisor rely on. Most of them are undocumented.

use std::io::Read;

use vmm::ErrorKind;
use vmm::api::{Action, Failure, Reply};

use crate::client::{plain, request, serve};

#[test]
fn a_status_line_has_no_reason_phrase() {
    let server = serve(plain);
    for (method, path, line) in [
        ("GET", "/api/v1/vmm.ping", "HTTP/1.1 200 "),
        ("PUT", "/api/v1/vm.boot", "HTTP/1.1 204 "),
        ("GET", "/api/v1/nothing", "HTTP/1.1 404 "),
        ("POST", "/api/v1/vm.boot", "HTTP/1.1 405 "),
        ("PUT", "/api/v1/vm.coredump", "HTTP/1.1 501 "),
    ] {
        assert_eq!(server.ask(method, path, "").head.lines().next(), Some(line));
    }
    let mut client = server.client();
    client.send("this is not HTTP\r\n\r\n");
    assert_eq!(client.answer().head.lines().next(), Some("HTTP/1.1 400 "));
}

#[test]
fn an_answer_is_what_cloud_hypervisor_answers() {
    let server = serve(|_| Ok(Reply::Json(r#"{"version":"v53"}"#.to_string())));
    let mut client = server.client();
    client.send(request("GET", "/api/v1/vmm.ping", ""));
    let mut bytes = [0; 1023];
    // A single read: some clients never do a second one.
    let count = client.0.read(&mut bytes).unwrap();
    assert_eq!(
        std::str::from_utf8(&bytes[..count]).unwrap(),
        "HTTP/1.1 200 \r\nServer: Cloud Hypervisor API\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n\
         Content-Length: 17\r\n\r\n{\"version\":\"v53\"}"
    );
}

#[test]
fn an_answer_without_a_body_has_neither_type_nor_length() {
    let server = serve(plain);
    assert_eq!(
        server.ask("PUT", "/api/v1/vm.boot", "").head,
        "HTTP/1.1 204 \r\nServer: Cloud Hypervisor API\r\nConnection: keep-alive"
    );
}

#[test]
fn vmm_shutdown_answers_200_and_nothing() {
    let answer = serve(plain).ask("PUT", "/api/v1/vmm.shutdown", "");
    assert_eq!((answer.status, answer.header("Content-Length"), &*answer.body), (200, Some("0"), ""));
}

#[test]
fn json_is_ascii() {
    let failure = Failure::new(ErrorKind::Host, "tap größer: 日本 \u{1F980}");
    let server = serve(move |action| match action {
        Action::Ping => Ok(Reply::Json("{\"version\":\"é\"}".to_string())),
        _ => Err(failure.clone()),
    });
    assert_eq!(server.ask("GET", "/api/v1/vmm.ping", "").body, r#"{"version":"\u00e9"}"#);
    let answer = server.ask("PUT", "/api/v1/vm.boot", "");
    assert!(answer.body.is_ascii(), "{answer:?}");
    assert_eq!(answer.chain(), ["tap größer: 日本 \u{1F980}"]);
}

#[test]
fn a_failure_is_an_array_of_strings_outermost_first() {
    let kinds = [
        (ErrorKind::Invalid, 400),
        (ErrorKind::NotFound, 404),
        (ErrorKind::Conflict, 409),
        (ErrorKind::Busy, 429),
        (ErrorKind::Host, 500),
        (ErrorKind::Unsupported, 501),
    ];
    for (kind, status) in kinds {
        let server = serve(move |_| Err(Failure::new(kind, "VM is not created").in_context("The VM cannot boot")));
        let answer = server.ask("PUT", "/api/v1/vm.boot", "");
        assert_eq!((answer.status, &*answer.body), (status, r#"["The VM cannot boot","VM is not created"]"#));
        assert_eq!(answer.header("Content-Type"), Some("application/json"));
    }
}

#[test]
fn one_connection_carries_many_requests() {
    let server = serve(plain);
    let mut client = server.client();
    for _ in 0..100 {
        assert_eq!(client.ask("GET", "/api/v1/vmm.ping", "").status, 200);
        assert_eq!(client.ask("PUT", "/api/v1/vm.add-net", r#"{"tap":"t"}"#).status, 204);
        assert_eq!(client.ask("GET", "/nothing", "").status, 404);
        assert_eq!(client.ask("PUT", "/api/v1/vm.create", "{").status, 400);
    }
}

#[test]
fn a_request_may_come_in_any_pieces() {
    let server = serve(plain);
    let mut client = server.client();
    for byte in request("PUT", "/api/v1/vm.add-net", r#"{"tap":"t"}"#).bytes() {
        client.send([byte]);
    }
    assert_eq!(client.answer().status, 204);
    assert!(server.asked()[0].contains(r#"tap: Some("t")"#));
}

#[test]
fn requests_that_come_together_are_answered_in_order() {
    let server = serve(plain);
    let mut client = server.client();
    client.send([request("GET", "/api/v1/vmm.ping", ""), request("PUT", "/api/v1/vm.boot", "")].concat());
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"Connection: keep-alive\r\n\r\n") {
        let mut chunk = [0; 1024];
        let count = client.0.read(&mut chunk).unwrap();
        assert!(count > 0);
        bytes.extend_from_slice(&chunk[..count]);
    }
    let text = String::from_utf8(bytes).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 ") && text.contains("HTTP/1.1 204 "), "{text}");
    assert_eq!(server.asked(), ["Ping", "Boot"]);
}

#[test]
fn a_body_may_be_chunked() {
    let server = serve(plain);
    let mut client = server.client();
    client.send("PUT /api/v1/vm.remove-device HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n");
    client.send("4\r\n{\"id\r\n8;x=y\r\n\":\"pf0\"}\r\n0\r\n\r\n");
    assert_eq!(client.answer().status, 204);
    assert_eq!(server.asked(), [r#"RemoveDevice(RemoveDevice { id: "pf0" })"#]);
}

#[test]
fn a_client_that_expects_100_continue_gets_it() {
    let server = serve(plain);
    let mut client = server.client();
    client
        .send("PUT /api/v1/vm.remove-device HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\nExpect: 100-continue\r\n\r\n");
    let mut bytes = [0; 25];
    client.0.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"HTTP/1.1 100 Continue\r\n\r\n");
    client.send(r#"{"id":"pf0"}"#);
    assert_eq!(client.answer().status, 204);
}

#[test]
fn a_client_that_asks_to_close_gets_the_answer_and_is_closed() {
    let server = serve(plain);
    let mut client = server.client();
    client.send("GET /api/v1/vmm.ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    let answer = client.answer();
    assert_eq!((answer.status, answer.header("Connection")), (200, Some("close")));
    assert!(client.is_closed());
}

#[test]
fn a_client_that_has_shut_down_its_side_is_answered() {
    let server = serve(plain);
    let mut client = server.client();
    client.send(request("GET", "/api/v1/vmm.ping", ""));
    client.0.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(client.answer().status, 200);
    assert!(client.is_closed());
}

#[test]
fn a_wrong_method_is_405_with_the_right_one() {
    let server = serve(plain);
    for (method, path, allow) in [
        ("PUT", "/api/v1/vmm.ping", "GET"),
        ("GET", "/api/v1/vm.create", "PUT"),
        ("POST", "/api/v1/vm.create", "PUT"),
        ("DELETE", "/api/v1/vm.snapshot", "PUT"),
        ("PATCH", "/api/v1/vm.info", "GET"),
        ("OPTIONS", "/metrics", "GET"),
        ("BREW", "/api/v1/vm.boot", "PUT"),
    ] {
        let answer = server.ask(method, path, "");
        assert_eq!((answer.status, answer.header("Allow")), (405, Some(allow)), "{method} {path}");
        assert_eq!(answer.chain(), [format!("this endpoint supports only {allow}")]);
    }
    let mut client = server.client();
    client.send("HEAD /api/v1/vm.info HTTP/1.1\r\nHost: x\r\n\r\n");
    let mut bytes = [0; 1024];
    let count = client.0.read(&mut bytes).unwrap();
    let text = std::str::from_utf8(&bytes[..count]).unwrap();
    assert!(text.starts_with("HTTP/1.1 405 \r\n") && text.ends_with("\r\n\r\n"), "{text}");
    assert!(server.asked().is_empty());
}

#[test]
fn an_unknown_path_is_404() {
    let server = serve(plain);
    for path in ["/", "/api/v1/", "/api/v1/vm.Info", "/api/v2/vm.info", "/api/v1/vm.info/", "/api/v1/vm.info?x=1", "*"]
    {
        let answer = server.ask("GET", path, "");
        assert_eq!((answer.status, &*answer.body), (404, r#"["Not Found"]"#), "{path}");
    }
}

#[test]
fn metrics_are_prometheus_text() {
    let answer = serve(plain).ask("GET", "/metrics", "");
    assert_eq!(answer.header("Content-Type"), Some("text/plain; version=0.0.4"));
    assert_eq!(answer.body, "sriov_vfs{pf=\"pf0\"} 8\n");
}

#[test]
fn a_large_answer_arrives_whole_at_a_client_that_reads_late() {
    let text = format!("\"{}\"", "x".repeat(8 << 20));
    let reply = text.clone();
    let server = serve(move |_| Ok(Reply::Json(reply.clone())));
    let mut client = server.client();
    client.send(request("GET", "/api/v1/vm.info", ""));
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(client.answer().body, text);
    assert_eq!(client.ask("GET", "/api/v1/vm.info", "").body, text);
}

/// Such a request may be an attempt to smuggle another one past a proxy: `RFC 9112 §6.3`.
#[test]
fn request_with_two_lengths_closes_the_connection() {
    let server = serve(plain);
    let mut client = server.client();
    client.send(
        "PUT /api/v1/vm.resize HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n\
         2\r\n{}\r\n0\r\n\r\n",
    );
    let answer = client.answer();
    assert_eq!(answer.status, 204);
    let connection: Vec<_> = answer.head.lines().filter(|line| line.starts_with("Connection:")).collect();
    assert_eq!(connection, ["Connection: close"]);
    assert!(client.is_closed());
}
