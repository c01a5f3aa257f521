//! The sockets of the API: one for all clients, and one for readers.

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use crate::api::{ApiSocket, BoundSocket, Claim, Clients, Handler, Server};
use crate::error::Error;
use crate::landlock::Rule;

/// The sockets that are claimed, before they exist.
pub(super) struct Claims {
    all: Option<Claim>,
    readers: Option<Claim>,
}

/// The sockets that exist, before they are served.
pub(super) struct Listening {
    all: Option<(UnixListener, Option<BoundSocket>)>,
    readers: Option<(UnixListener, Option<BoundSocket>)>,
}

/// A server and its socket, which is removed after the server has ended.
pub(super) type Served = (Server, Option<BoundSocket>);

/// Returns the most files that clients make this process open.
pub(super) fn most_files(api: &Option<ApiSocket>, readers: &Option<ApiSocket>) -> u64 {
    let of = |socket: &Option<ApiSocket>, clients: Clients| if socket.is_some() { clients.most_files() } else { 0 };
    of(api, Clients::All) + of(readers, Clients::Readers)
}

/// Returns the folders of the sockets, which the program needs with any VM.
pub(super) fn own_files(api: &Option<ApiSocket>, readers: &Option<ApiSocket>) -> Vec<Rule> {
    let sockets = [("--api-socket", api), ("--read-only-socket", readers)];
    let path = |(option, socket): (_, &Option<ApiSocket>)| {
        socket.as_ref().and_then(ApiSocket::path).map(|path| Rule::of_socket(option, path))
    };
    sockets.into_iter().filter_map(path).collect()
}

/// Claims the sockets.
///
/// # Errors
///
/// Fails if another VMM uses one of them, or both are the same.
pub(super) fn claim(api: &Option<ApiSocket>, readers: &Option<ApiSocket>) -> Result<Claims, Error> {
    let all = api.as_ref().map(ApiSocket::claim).transpose()?;
    let readers = readers.as_ref().map(ApiSocket::claim).transpose().map_err(Error::ReadOnly)?;
    if let (Some(all), Some(readers)) = (&all, &readers) {
        readers.differ(all).map_err(Error::ReadOnly)?;
    }
    Ok(Claims { all, readers })
}

impl Claims {
    /// Creates the sockets.
    ///
    /// # Errors
    ///
    /// Fails if one of them cannot be created. Only lock files remain then.
    pub(super) fn listen(self) -> Result<Listening, Error> {
        let all = self.all.map(Claim::listen).transpose()?;
        let readers = self.readers.map(Claim::listen).transpose().map_err(Error::ReadOnly)?;
        Ok(Listening { all, readers })
    }
}

impl Listening {
    /// Serves the sockets. `handler` applies the actions.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptors or threads left.
    pub(super) fn serve<H: Handler + 'static>(self, handler: &Arc<H>) -> io::Result<Vec<Served>> {
        let sockets = [(self.all, Clients::All), (self.readers, Clients::Readers)];
        let serve = |(socket, clients): (Option<(UnixListener, Option<BoundSocket>)>, Clients)| {
            let (listener, bound) = socket?;
            Some(Server::start(listener, clients, handler.clone()).map(|server| (server, bound)))
        };
        sockets.into_iter().filter_map(serve).collect()
    }
}
