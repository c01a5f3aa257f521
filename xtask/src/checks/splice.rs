//! A TCP port that forwards to a Unix socket, for programs that cannot connect to one.

use std::io::{self, copy};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// A TCP port on the loopback address, open until this is dropped.
pub(crate) struct Splice {
    address: SocketAddr,
    ended: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
}

impl Splice {
    /// Forwards connections to a free port to the Unix socket `path`.
    pub(crate) fn start(path: &Path) -> io::Result<Splice> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let ended = Arc::new(AtomicBool::new(false));
        let (path, is_over) = (path.to_owned(), ended.clone());
        let accepting = thread::spawn(move || {
            for client in listener.incoming() {
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                let path = path.clone();
                // A client detects on its own that its connection failed.
                thread::spawn(move || client.and_then(|client| pass_on(client, path)));
            }
        });
        Ok(Splice { address, ended, accepting: Some(accepting) })
    }

    /// Address for clients.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Splice {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        // Wakes the thread, which then ends.
        let _ = TcpStream::connect(self.address);
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

fn pass_on(client: TcpStream, path: PathBuf) -> io::Result<()> {
    client.set_nodelay(true)?;
    let server = UnixStream::connect(path)?;
    let (mut from_client, mut to_server) = (client.try_clone()?, server.try_clone()?);
    let up = thread::spawn(move || {
        let _ = copy(&mut from_client, &mut to_server);
        let _ = to_server.shutdown(Shutdown::Write);
    });
    let _ = copy(&mut &server, &mut &client);
    let _ = client.shutdown(Shutdown::Both);
    let _ = server.shutdown(Shutdown::Both);
    let _ = up.join();
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn bytes_sent_to_the_port_reach_the_socket_and_answers_return() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let splice = Splice::start(&path).unwrap();
        let mut client = TcpStream::connect(splice.address()).unwrap();
        client.write_all(b"question").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let mut text = String::new();
        server.read_to_string(&mut text).unwrap();
        assert_eq!(text, "question");
        server.write_all(b"answer").unwrap();
        drop(server);
        text.clear();
        client.read_to_string(&mut text).unwrap();
        assert_eq!(text, "answer");
    }
}
