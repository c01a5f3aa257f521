//! TLS connections with and without mutual trust.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::Instant;

use super::testing::Authority;
use super::*;

/// Deadline of a handshake.
fn until() -> Deadline {
    Deadline::after(PATIENCE, &virtio_devices::Cancel::new().unwrap())
}

/// Runs the target's side of a handshake.
fn accept(stream: TcpStream, config: &Arc<rustls::ServerConfig>, until: &Deadline) -> io::Result<Session> {
    stream.set_nonblocking(true)?;
    let mut accepting = Accepting::new(config)?;
    while accepting.0.is_handshaking() {
        match accepting.advance(&stream, &mut []) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                until.ready(&stream, rustix::event::PollFlags::IN)?;
            }
            Err(error) => return Err(error),
        }
    }
    stream.set_nonblocking(false)?;
    Ok(accepting.into_session(stream))
}

/// A folder with all files of one authority.
fn folder(authority: &Authority) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    authority.write(folder.path(), &["localhost", "127.0.0.1"]);
    folder
}

/// Result of a connection at the source, which also reads a reply, and at the target.
fn meet(source: &Path, target: &Path, host: &str) -> (Result<(), String>, Result<(), String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, server) = (listener.local_addr().unwrap(), server(target).unwrap());
    let target = thread::spawn(move || -> io::Result<()> {
        let session = accept(listener.accept()?.0, &server, &until())?;
        let mut bytes = [0; 4];
        (&session).read_exact(&mut bytes)?;
        (&session).write_all(&bytes)
    });
    let client = client(source).unwrap();
    let talk = || -> io::Result<()> {
        let session = Session::connect(TcpStream::connect(address)?, host, &client, &until())?;
        (&session).write_all(b"here")?;
        let mut bytes = [0; 4];
        (&session).read_exact(&mut bytes)?;
        assert_eq!(&bytes, b"here");
        Ok(())
    };
    let told = |result: io::Result<()>| {
        result.map_err(|error| error.to_string()).inspect_err(|line| assert!(!line.contains('\n'), "{line}"))
    };
    let source = told(talk());
    (source, told(target.join().unwrap()))
}

#[test]
fn both_sides_prove_who_they_are() {
    let one = Authority::new("one");
    let both = folder(&one);
    for host in ["localhost", "127.0.0.1"] {
        assert_eq!(meet(both.path(), both.path(), host), (Ok(()), Ok(())));
    }
    let (source, target) = meet(both.path(), both.path(), "other.example");
    assert!(source.unwrap_err().contains("certificate not valid for name \"other.example\"") && target.is_err());
}

#[test]
fn foreign_or_expired_certificate_is_refused_by_either_side() {
    let (one, other) = (Authority::new("one"), Authority::new("other"));
    let (both, stranger) = (folder(&one), folder(&other));
    let (source, target) = meet(both.path(), stranger.path(), "localhost");
    assert!(source.as_ref().unwrap_err().contains("UnknownIssuer"), "{source:?}");
    assert!(target.as_ref().unwrap_err().contains("UnknownCA"), "{target:?}");
    // The source trusts the target, but not the other way round.
    fs::copy(both.path().join("ca-cert.pem"), stranger.path().join("ca-cert.pem")).unwrap();
    let (source, target) = meet(stranger.path(), both.path(), "localhost");
    assert!(target.as_ref().unwrap_err().contains("UnknownIssuer"), "{target:?}");
    assert!(source.is_err());
    for (name, names) in [("server", ["localhost"]), ("client", ["source"])] {
        let expired = folder(&one);
        one.certify(expired.path(), name, &names, true);
        let (source, target) = match name {
            "server" => meet(both.path(), expired.path(), "localhost"),
            _ => meet(expired.path(), both.path(), "localhost"),
        };
        let refuses = if name == "server" { &source } else { &target };
        assert!(refuses.as_ref().unwrap_err().contains("certificate expired"), "{name}: {source:?} {target:?}");
        assert!(source.is_err() && target.is_err());
    }
}

#[test]
fn source_without_certificate_and_peer_without_tls_are_refused() {
    let one = Authority::new("one");
    let both = folder(&one);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = server(both.path()).unwrap();
    let accepts = thread::spawn(move || {
        (0..2).map(|_| accept(listener.accept().unwrap().0, &server, &until()).unwrap_err().to_string()).collect()
    });
    let mut roots = rustls::RootCertStore::empty();
    let authority = fs::read(both.path().join("ca-cert.pem")).unwrap();
    let pem = rustls::pki_types::pem::PemObject::from_pem_slice(&authority);
    roots.add(pem.unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let nobody = Arc::new(config.with_root_certificates(roots).with_no_client_auth());
    let session = Session::connect(TcpStream::connect(address).unwrap(), "localhost", &nobody, &until());
    // In TLS 1.3 the client receives the decision with its first read.
    let decision = session.and_then(|session| (&session).read(&mut [0; 1]));
    let decision = decision.unwrap_err().to_string();
    assert!(decision.contains("CertificateRequired"), "{decision}");
    (&TcpStream::connect(address).unwrap()).write_all(&[b's'; 40]).unwrap();
    let said: Vec<String> = accepts.join().unwrap();
    assert!(said[0].contains("peer sent no certificates"), "{said:?}");
    assert_eq!(said[1], "TLS: the peer does not speak it; give both sides a tls_dir");
}

#[test]
fn silent_peer_times_out_after_the_handshake_limit() {
    let one = Authority::new("one");
    let both = folder(&one);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let began = Instant::now();
    let error = Session::connect(stream, "localhost", &client(both.path()).unwrap(), &until()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert!(began.elapsed() < PATIENCE + Duration::from_secs(20), "{:?}", began.elapsed());
}

/// Both directions at once, with more data than any buffer holds.
#[test]
fn one_thread_reads_while_another_writes() {
    const LEN: usize = 8 << 20;
    let one = Authority::new("one");
    let both = folder(&one);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, server) = (listener.local_addr().unwrap(), server(both.path()).unwrap());
    let exchange = |session: Session, seed: u8| {
        let session = Arc::new(session);
        let writer = Arc::clone(&session);
        let bytes = move |seed: u8| (0..LEN).map(|i| (i % 251) as u8 ^ seed).collect::<Vec<_>>();
        let writes = thread::spawn(move || (&*writer).write_all(&bytes(seed)).unwrap());
        let mut read = vec![0; LEN];
        (&*session).read_exact(&mut read).unwrap();
        assert!(read == bytes(seed ^ 1));
        writes.join().unwrap();
    };
    let target = thread::spawn(move || exchange(accept(listener.accept().unwrap().0, &server, &until()).unwrap(), 0));
    let stream = TcpStream::connect(address).unwrap();
    exchange(Session::connect(stream, "localhost", &client(both.path()).unwrap(), &until()).unwrap(), 1);
    target.join().unwrap();
}

#[test]
fn a_file_that_is_missing_or_wrong_is_named() {
    let one = Authority::new("one");
    for (name, contents, said) in [
        ("ca-cert.pem", None, "ca-cert.pem: No such file"),
        ("client-cert.pem", None, "client-cert.pem: No such file"),
        ("client-key.pem", None, "client-key.pem: No such file"),
        ("ca-cert.pem", Some("nothing"), "ca-cert.pem: it has no certificate"),
        ("client-key.pem", Some("nothing"), "client-key.pem: "),
        ("client-cert.pem", Some("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"), "client-cert.pem: "),
    ] {
        let folder = folder(&one);
        match contents {
            Some(contents) => fs::write(folder.path().join(name), contents).unwrap(),
            None => fs::remove_file(folder.path().join(name)).unwrap(),
        }
        let line = client(folder.path()).unwrap_err();
        let expected = format!("tls_dir={}: {said}", folder.path().display());
        assert!(line.starts_with(&expected) && !line.contains('\n'), "{line}");
    }
    // A key of another certificate; a folder instead of a file.
    let folder = folder(&one);
    fs::copy(folder.path().join("client-key.pem"), folder.path().join("server-key.pem")).unwrap();
    let line = server(folder.path()).unwrap_err();
    assert!(line.contains("server-cert.pem: it does not belong to server-key.pem"), "{line}");
    fs::remove_file(folder.path().join("server-key.pem")).unwrap();
    fs::create_dir(folder.path().join("server-key.pem")).unwrap();
    assert!(server(folder.path()).unwrap_err().ends_with("server-key.pem: it is no file"));
}
