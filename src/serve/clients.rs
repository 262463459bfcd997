//! Connections per address, limited so that no client can take every place of the server.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

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
}
