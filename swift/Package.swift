// swift-tools-version:5.9
// `tools/xcframework.sh` makes what this needs: AnecFFI.xcframework and Sources/Anec/anec.swift.
import PackageDescription

let package = Package(
    name: "Anec",
    platforms: [.macOS(.v15), .iOS(.v18)],
    products: [.library(name: "Anec", targets: ["Anec"])],
    targets: [
        .binaryTarget(name: "anecFFI", path: "AnecFFI.xcframework"),
        .target(
            name: "Anec",
            dependencies: ["anecFFI"],
            linkerSettings: [.linkedFramework("CoreML"), .linkedFramework("Foundation"), .linkedLibrary("objc")]
        ),
    ]
)
