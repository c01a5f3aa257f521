//! The API's socket.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use vmm::api::ApiSocket;

#[test]
fn it_is_a_path_or_a_descriptor() {
    let path = |text: &str| ApiSocket::Path(text.into());
    for (text, socket) in [
        ("path=/run/api.sock", path("/run/api.sock")),
        ("/run/api.sock", path("/run/api.sock")),
        ("api.sock", path("api.sock")),
        ("/run/a=b.sock", path("/run/a=b.sock")),
        ("path=\"/run/a,b\"", path("/run/a,b")),
        ("fd=3", ApiSocket::Fd(3)),
    ] {
        assert_eq!(text.parse::<ApiSocket>().unwrap(), socket, "{text}");
    }
    for text in ["", "path=", "fd=", "fd=2", "fd=x", "fd=-1", "socket=/x", "path=/x,fd=3", "path=/x,path=/y"] {
        let error = text.parse::<ApiSocket>().unwrap_err().to_string();
        assert_eq!(error, format!("{text}: give path=<path>, a path alone, or fd=<number>"));
    }
}

#[test]
fn a_second_program_is_refused_and_the_first_one_stays() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("api.sock");
    let (listener, bound) = ApiSocket::Path(path.clone()).listen().unwrap();
    let error = ApiSocket::Path(path.clone()).listen().unwrap_err().to_string();
    let shown = path.display();
    assert_eq!(error, format!("path={shown}: API socket {shown} is already in use; give another path"));
    UnixStream::connect(&path).unwrap();
    drop((listener, bound));
}

#[test]
fn the_socket_is_removed_at_the_end_and_its_lock_file_stays() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("api.sock");
    let bound = ApiSocket::Path(path.clone()).listen().unwrap();
    assert!(path.exists());
    drop(bound);
    assert!(!path.exists());
    assert!(directory.path().join("api.sock.lock").exists());
    ApiSocket::Path(path).listen().unwrap();
}

#[test]
fn the_socket_of_a_killed_program_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("api.sock");
    drop(UnixListener::bind(&path).unwrap());
    assert!(UnixStream::connect(&path).is_err());
    let (_listener, _bound) = ApiSocket::Path(path.clone()).listen().unwrap();
    UnixStream::connect(&path).unwrap();
}

#[test]
fn a_file_that_is_no_socket_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("precious");
    fs::write(&path, "data").unwrap();
    let error = ApiSocket::Path(path.clone()).listen().unwrap_err().to_string();
    assert!(error.ends_with("exists and is not a socket; give another path, or remove it"), "{error}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "data");
}

#[test]
fn socket_replaced_by_another_process_is_not_removed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("api.sock");
    let (listener, bound) = ApiSocket::Path(path.clone()).listen().unwrap();
    fs::rename(&path, directory.path().join("old")).unwrap();
    let _other = UnixListener::bind(&path).unwrap();
    drop((listener, bound));
    UnixStream::connect(&path).unwrap();
}

#[test]
fn a_directory_that_does_not_exist_is_named() {
    let error = ApiSocket::Path("/nonexistent/api.sock".into()).listen().unwrap_err().to_string();
    assert_eq!(
        error,
        "path=/nonexistent/api.sock: the folder /nonexistent does not exist; make it (mkdir -p), or give \
         another path"
    );
}

#[test]
fn a_descriptor_that_listens_is_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("api.sock");
    let given = UnixListener::bind(&path).unwrap();
    let (listener, bound) = ApiSocket::Fd(given.as_raw_fd()).listen().unwrap();
    assert!(bound.is_none());
    let _client = UnixStream::connect(&path).unwrap();
    listener.accept().unwrap();
    drop(listener);
    assert!(path.exists());
}

#[test]
fn one_socket_cannot_be_that_of_readers_as_well() {
    let directory = tempfile::tempdir().unwrap();
    let [one, other] = ["one", "other"].map(|name| UnixListener::bind(directory.path().join(name)).unwrap());
    let again = one.try_clone().unwrap();
    let claim = |listener: &UnixListener| ApiSocket::Fd(listener.as_raw_fd()).claim().unwrap();
    let error = claim(&again).differ(&claim(&one)).unwrap_err().to_string();
    assert_eq!(error, "it is the socket of --api-socket; give another one");
    claim(&other).differ(&claim(&one)).unwrap();
    let path = ApiSocket::Path(directory.path().join("path"));
    let claimed = path.claim().unwrap();
    claim(&one).differ(&claimed).unwrap();
    assert!(path.claim().unwrap_err().to_string().contains("is already in use"));
}

#[test]
fn a_descriptor_that_does_not_listen_is_refused() {
    let (stream, _peer) = UnixStream::pair().unwrap();
    let file = fs::File::open("/dev/null").unwrap();
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    for fd in [stream.as_raw_fd(), file.as_raw_fd(), tcp.as_raw_fd(), 1_000_000] {
        let error = ApiSocket::Fd(fd).listen().unwrap_err().to_string();
        assert!(error.starts_with(&format!("fd={fd}: not a listening Unix socket")), "{error}");
    }
}

#[test]
fn no_client_is_refused_once_the_socket_exists() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("api.sock");
    let stop = AtomicBool::new(false);
    let attempts = AtomicU64::new(0);
    thread::scope(|scope| {
        let client = scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                attempts.fetch_add(1, Ordering::AcqRel);
                if let Err(error) = UnixStream::connect(&path) {
                    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
                }
            }
        });
        for _ in 0..500 {
            let (listener, bound) = ApiSocket::Path(path.clone()).listen().unwrap();
            // As when the program ends, the name is removed first.
            drop(bound);
            // A client that found the name just before is still connecting to the listener, which must stay open for
            // it.
            let before = attempts.load(Ordering::Acquire);
            while attempts.load(Ordering::Acquire) == before && !client.is_finished() {
                thread::yield_now();
            }
            drop(listener);
        }
        stop.store(true, Ordering::Release);
        client.join().unwrap();
    });
}

#[test]
fn a_path_too_long_for_a_temporary_name_next_to_it_works_too() {
    let directory = tempfile::tempdir().unwrap();
    let room = 107 - directory.path().as_os_str().len() - 1;
    let path = directory.path().join("x".repeat(room));
    let (_listener, _bound) = ApiSocket::Path(path.clone()).listen().unwrap();
    UnixStream::connect(&path).unwrap();
}

#[test]
fn stale_half_created_socket_is_replaced_but_a_file_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let (path, beside) = (directory.path().join("api.sock"), directory.path().join("api.sock.new"));
    drop(UnixListener::bind(&beside).unwrap());
    drop(ApiSocket::Path(path.clone()).listen().unwrap());
    assert!(!beside.exists());
    fs::write(&beside, "data").unwrap();
    let error = ApiSocket::Path(path).listen().unwrap_err().to_string();
    assert!(error.contains("api.sock.new: exists and is not a socket"), "{error}");
    assert_eq!(fs::read_to_string(&beside).unwrap(), "data");
}
