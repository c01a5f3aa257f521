//! Paths without a listener, or with the wrong one.

use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};

use super::super::message::Request;
use super::*;

fn server(rig: &Rig) -> Result<VhostUserSocket, String> {
    let path = rig.path().display().to_string();
    VhostUserSocket::listen(rig.path()).map_err(|error| error.to_string().replace(&path, "PATH"))
}

#[test]
fn a_path_without_a_listener_is_refused_with_the_way_out() {
    let rig = Rig::new();
    assert_eq!(rig.refusal(), "socket=PATH: no such file; start the backend first, or give the path of its socket");
    drop(UnixListener::bind(rig.path()).unwrap());
    assert_eq!(
        rig.refusal(),
        "socket=PATH: nothing is listening there (Connection refused); start the backend first",
        "its owner is gone"
    );
    std::fs::remove_file(rig.path()).unwrap();
    let not_a_socket = "socket=PATH: not a stream socket; give the path of the backend's socket";
    let _datagrams = UnixDatagram::bind(rig.path()).unwrap();
    assert_eq!(rig.refusal(), not_a_socket);
    std::fs::remove_file(rig.path()).unwrap();
    std::fs::write(rig.path(), "").unwrap();
    assert_eq!(rig.refusal(), not_a_socket);
    std::fs::remove_file(rig.path()).unwrap();
    std::fs::create_dir(rig.path()).unwrap();
    assert_eq!(rig.refusal(), not_a_socket);
}

#[test]
fn an_invalid_path_and_a_denied_one_give_different_errors() {
    let long = VhostUserSocket::of_peer("x".repeat(200).into()).first(Instant::now(), None).unwrap_err().to_string();
    assert!(long.contains("File name too long"), "{long}");
    // A test that runs as root has access to every path.
    let closed = VhostUserSocket::of_peer("/run/vf1.sock".into()).unreachable(Errno::ACCESS).to_string();
    assert!(
        closed.starts_with("socket=/run/vf1.sock: no permission to use it; give this user write access"),
        "{closed}"
    );
}

#[test]
fn a_backend_that_lets_connections_wait_is_not_waited_for() {
    let rig = Rig::new();
    let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(rig.path()).unwrap()).unwrap();
    listen(&listener, 0).unwrap();
    let _waiting = UnixStream::connect(rig.path()).unwrap();
    assert!(
        rig.refusal().starts_with("socket=PATH: the backend is not accepting connections, and others are waiting;")
    );
}

#[test]
fn a_socket_in_use_is_left_alone_and_a_stale_one_is_replaced() {
    let rig = Rig::new();
    let owner = UnixListener::bind(rig.path()).unwrap();
    assert!(server(&rig).unwrap_err().starts_with("socket=PATH: another program is listening there;"));
    assert!(rig.path().exists());
    drop(owner);
    let ours = server(&rig).unwrap();
    UnixStream::connect(rig.path()).unwrap();
    drop(ours);
    assert!(!rig.path().exists());
    let ours = server(&rig).unwrap();
    std::fs::remove_file(rig.path()).unwrap();
    let successor = UnixListener::bind(rig.path()).unwrap();
    drop(ours);
    assert!(rig.path().exists(), "it is another's");
    drop(successor);
    std::fs::remove_file(rig.path()).unwrap();
    std::fs::write(rig.path(), "precious").unwrap();
    assert!(server(&rig).unwrap_err().starts_with("socket=PATH: exists and is not a socket;"));
    assert_eq!(std::fs::read(rig.path()).unwrap(), b"precious");
}

#[test]
fn a_socket_in_a_folder_that_does_not_exist_is_refused() {
    let rig = Rig::new();
    let refused = VhostUserSocket::listen(rig.path().join("x")).map(|_| ()).unwrap_err().to_string();
    assert!(refused.ends_with("does not exist; make it (mkdir -p), or give another path"), "{refused}");
}

#[test]
fn a_server_waits_for_its_peer_only_so_long() {
    let rig = Rig::new();
    let socket = server(&rig).unwrap();
    let refused = socket.first(Instant::now() + Duration::from_millis(20), None).unwrap_err().to_string();
    assert!(refused.contains("no backend connected within 10 s; start it in client mode"), "{refused}");
    let caller = UnixStream::connect(rig.path()).unwrap();
    assert!(socket.first(Instant::now(), None).is_ok());
    drop(caller);
}

#[test]
fn a_server_whose_set_up_fails_leaves_no_socket_behind() {
    let rig = Rig::new();
    let mut legacy = Script::new(1);
    legacy.features = 0;
    let _peer = TestPeer::call(rig.path(), legacy, Arc::clone(&rig.near));
    let spec = rig.server_spec();
    assert!(matches!(VhostUser::connect(spec, &Memory::new(rig.map.clone())), Err(VhostUserError::Legacy(_))));
    assert!(!rig.path().exists());
}

#[test]
fn a_wait_for_a_mute_absent_or_slow_peer_can_be_cancelled() {
    let rig = Rig::new();
    let mut mute = Script::new(1);
    mute.mute = vec![Request::GET_FEATURES];
    let mut slow = Script::new(1);
    slow.maps_late = true;
    for script in [Some(mute), Some(slow), None] {
        let cancel = Cancel::new().unwrap();
        let is_absent = script.is_none();
        let peer = script.map(|script| rig.peer(script));
        let spec = if is_absent { rig.server_spec() } else { rig.spec(1) };
        let spec = VhostUserSpec { cancel: Some(cancel.clone()), ..spec };
        let memory = Memory::new(rig.map.clone());
        let connected = std::thread::spawn(move || VhostUser::connect(spec, &memory).map(|_| ()).unwrap_err());
        // It is waiting by now, or is about to.
        std::thread::sleep(Duration::from_millis(100));
        let begun = Instant::now();
        cancel.cancel();
        let error = connected.join().unwrap();
        assert!(matches!(error, VhostUserError::Cancelled(_)), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
        assert!(!is_absent || !rig.path().exists(), "the socket is gone");
        drop(peer);
        let _ = std::fs::remove_file(rig.path());
    }
}
