//! Connections per address, limited so that no client can take every place of the server.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use tokio::sync::Notify;

/// Counter of open connections per address.
#[derive(Debug)]
pub struct ClientAddresses {
    /// Maximum number of connections per address.
    most: usize,
    open: Mutex<HashMap<IpAddr, usize>>,
}

/// Connection that counts until it is dropped.
#[derive(Debug)]
pub struct ClientConnection {
    addresses: Arc<ClientAddresses>,
    address: IpAddr,
}

impl ClientAddresses {
    /// Creates a counter that allows `most` connections per address.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(ClientAddresses { most, open: Mutex::default() })
    }

    /// Counts a connection; `None` if its address has reached the limit.
    pub fn connect(self: &Arc<Self>, address: IpAddr) -> Option<ClientConnection> {
        // an IPv4 client of a dual-stack socket is the same client
        let address = address.to_canonical();
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(address).or_default();
        if *count >= self.most {
            return None;
        }
        *count += 1;
        Some(ClientConnection { addresses: self.clone(), address })
    }
}

impl Drop for ClientConnection {
    fn drop(&mut self) {
        let mut open = self.addresses.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(mut count) = open.entry(self.address) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// Requests of a connection.
#[derive(Debug)]
pub struct Activity {
    /// Requests whose answer isn't sent.
    requests: AtomicUsize,
    /// Beginning of the time without requests.
    idle_since: Mutex<Instant>,
    close: Notify,
}

/// Request in progress; the connection is busy until this is dropped.
pub struct BusyConnection(Arc<Activity>);

impl Activity {
    /// Begins a request.
    pub fn begin(self: &Arc<Self>) -> BusyConnection {
        self.requests.fetch_add(1, Ordering::SeqCst);
        BusyConnection(self.clone())
    }

    /// Waits until the connection has to make room for another one.
    pub async fn closed(&self) {
        self.close.notified().await;
    }
}

impl Drop for BusyConnection {
    fn drop(&mut self) {
        *self.0.idle_since.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        self.0.requests.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Open connections, of which idle ones make room for others.
#[derive(Debug, Default)]
pub struct IdleConnections(Mutex<Vec<Weak<Activity>>>);

impl IdleConnections {
    /// Adds a connection.
    pub fn add(&self) -> Arc<Activity> {
        let activity = Arc::new(Activity {
            requests: AtomicUsize::new(0),
            idle_since: Mutex::new(Instant::now()),
            close: Notify::new(),
        });
        let mut connections = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        connections.retain(|connection| connection.strong_count() > 0);
        connections.push(Arc::downgrade(&activity));
        activity
    }

    /// Closes the connection that has been without a request for longest, if any is.
    pub fn close_longest(&self) {
        let mut connections = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let since = |activity: &Activity| *activity.idle_since.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = connections.iter().enumerate().filter_map(|(index, connection)| {
            let activity = connection.upgrade()?;
            (activity.requests.load(Ordering::SeqCst) == 0).then(|| (since(&activity), index))
        });
        if let Some((_, index)) = idle.min()
            && let Some(activity) = connections.swap_remove(index).upgrade()
        {
            activity.close.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_leaves_places_for_others() {
        let addresses = ClientAddresses::new(2);
        let [one, mapped, other] = ["10.0.0.1", "::ffff:10.0.0.1", "10.0.0.2"].map(|a| a.parse::<IpAddr>().unwrap());
        let first = addresses.connect(one);
        let second = addresses.connect(mapped);
        assert!(first.is_some() && second.is_some());
        assert!(addresses.connect(one).is_none());
        assert!(addresses.connect(other).is_some());
        drop(first);
        assert!(addresses.connect(one).is_some());
        drop(second);
        assert_eq!(addresses.open.lock().unwrap().len(), 0, "who has left is forgotten");
    }

    #[tokio::test]
    async fn the_longest_idle_connection_makes_room() {
        let idle = IdleConnections::default();
        let connections = [(); 3].map(|()| idle.add());
        let busy = connections[0].begin();
        idle.close_longest();
        // the first is busy, so the second is the longest idle one
        connections[1].closed().await;
        drop(busy);
        idle.close_longest();
        connections[2].closed().await;
        idle.close_longest();
        connections[0].closed().await;
        idle.close_longest();
    }
}
